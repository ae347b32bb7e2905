"""What a power cut can leave of the files that a process has written, from the calls that it made.

The model is that of `crates/megatrain-core/src/disk/sim.rs`, for calls of Python and of every library, which
`faulty_disk.c` records: the bytes of a file reach the disk with an fsync of it, the entries of a folder with an fsync
of the folder, and until then each may be lost or kept whatever becomes of the others.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

Tree = dict[str, bytes | None]
"""Bytes of every file by path, None for folders."""

_FEW = 6
"""Changes of folders of which all subsets are tried."""


@dataclass(frozen=True)
class Call:
    """One recorded call: `create`, `write`, `set size`, `sync`, `create folder`, `rename`, `remove`, `sync folder`; or
    a `mark` that the test has put between two."""

    name: str
    path: str
    to: str = ""
    at: int = 0
    data: bytes = b""

    def __str__(self) -> str:
        return f"{self.name} {self.path}" + (f" -> {self.to}" if self.to else "")


def read_calls(record: Path) -> list[Call]:
    """What `disk_record` wrote."""
    data, calls, begin = record.read_bytes(), [], 0
    while begin < len(data):
        end = data.index(b"\n", begin)
        name, path, to, at, size = data[begin:end].decode().split("\t")
        begin = end + 1 + int(size)
        calls.append(Call(name, path, to, int(at), data[end + 1 : begin]))
    return calls


@dataclass
class _File:
    live: bytes = b""
    flushed: bytes = b""
    edits: list[Call] = field(default_factory=list)

    def edit(self, call: Call) -> None:
        self.live = _edited(self.live, call)
        self.edits.append(call)

    def left(self) -> list[bytes]:
        """What can be left of it: everything, nothing, the earlier half of what was written since, the length without
        the bytes, or the last write without those before it."""
        half, part = len(self.edits) // 2, self.flushed
        for call in self.edits[:half]:
            part = _edited(part, call)
        torn = self.edits[half]
        if torn.name == "write":
            part = _edited(part, Call("write", "", at=torn.at, data=torn.data[: len(torn.data) // 2]))
        zeros = self.flushed[: len(self.live)].ljust(len(self.live), b"\0")
        return [self.live, self.flushed, part, zeros, _edited(self.flushed, self.edits[-1])]


def _edited(content: bytes, call: Call) -> bytes:
    if call.name == "set size":
        return content[: call.at].ljust(call.at, b"\0")
    return content[: call.at].ljust(call.at, b"\0") + call.data + content[call.at + len(call.data) :]


@dataclass
class _Folder:
    live: dict[str, "_File | _Folder"] = field(default_factory=dict)
    flushed: dict[str, "_File | _Folder"] = field(default_factory=dict)


class Disk:
    """Files and folders below `root`, and what is still to be flushed of them. What is in `tree` is there, and flushed,
    already."""

    def __init__(self, root: str, tree: Tree | None = None) -> None:
        self._root = _Folder()
        self._prefix = root
        self._changes: list[tuple[_Folder, dict[str, _File | _Folder | None]]] = []
        for path, content in sorted((tree or {}).items()):
            folder, name = self._place(f"{root}/{path}")
            folder.live[name] = _Folder() if content is None else _File(content, content)
            folder.flushed[name] = folder.live[name]

    def _place(self, path: str) -> tuple[_Folder, str]:
        *folders, name = Path(path).relative_to(self._prefix).parts
        node: _File | _Folder = self._root
        for folder in folders:
            assert isinstance(node, _Folder)
            node = node.live[folder]
        assert isinstance(node, _Folder)
        return node, name

    def _change(self, folder: _Folder, entries: "dict[str, _File | _Folder | None]") -> None:
        _set(folder.live, entries)
        self._changes.append((folder, entries))

    def apply(self, call: Call) -> None:
        """Does what the call did. Raises KeyError when the record lacks something that came before."""
        if call.name == "mark":
            return
        if call.name == "sync folder" and call.path == self._prefix:
            self._flush(self._root)
            return
        folder, name = self._place(call.path)
        if call.name == "create":
            self._change(folder, {name: _File()})
        elif call.name == "create folder":
            self._change(folder, {name: _Folder()})
        elif call.name == "remove":
            assert not isinstance(node := folder.live[name], _Folder) or not node.live, f"{call.path} is not empty"
            self._change(folder, {name: None})
        elif call.name == "rename":
            target, new = self._place(call.to)
            assert target is folder, f"{call}: from one folder into another is not modelled"
            self._change(folder, {name: None, new: folder.live[name]})
        else:
            node = folder.live[name]
            if call.name == "sync folder":
                assert isinstance(node, _Folder)
                self._flush(node)
            elif call.name == "sync":
                assert isinstance(node, _File)
                node.flushed, node.edits = node.live, []
            else:
                assert isinstance(node, _File), call
                assert call.name in ("write", "set size"), call
                node.edit(call)

    def _flush(self, folder: _Folder) -> None:
        folder.flushed = dict(folder.live)
        self._changes = [change for change in self._changes if change[0] is not folder]

    def contents(self) -> Tree:
        """What a program sees."""
        return {path: node.live if isinstance(node, _File) else None for path, node in self._walk(None)}

    def crash_states(self) -> Iterator[Tree]:
        """Every state that a power cut could leave now. Of the changes of folders all subsets, or, when more than six
        are not flushed, each moment's, each alone, and all but each. With every subset the unflushed bytes of all files
        are left in the same way (`_File.left`); with the whole and the empty subset each file also fares differently
        from all others."""
        for kept in _subsets(len(self._changes)):
            found = self._walk([change for change, keep in zip(self._changes, kept, strict=True) if keep])
            fixed: Tree = {p: n.live if isinstance(n, _File) else None for p, n in found}
            open_files = {path: node.left() for path, node in found if isinstance(node, _File) and node.edits}
            if not open_files:
                yield fixed
                continue
            for way in range(5):
                yield fixed | {path: left[way] for path, left in open_files.items()}
            if len(set(kept)) < 2:
                for path, others in itertools.product(open_files, (0, 1)):
                    rest = fixed | {other: left[others] for other, left in open_files.items()}
                    for left in open_files[path]:
                        yield rest | {path: left}

    def _walk(
        self, kept: "list[tuple[_Folder, dict[str, _File | _Folder | None]]] | None"
    ) -> list[tuple[str, "_File | _Folder"]]:
        """Paths and nodes when these changes were added to what was flushed; None for all as it is now."""
        entries: dict[int, dict[str, _File | _Folder]] = {}
        for folder, changed in kept or ():
            _set(entries.setdefault(id(folder), dict(folder.flushed)), changed)
        found, pending = [], [("", self._root)]
        while pending:
            path, folder = pending.pop()
            held = folder.live if kept is None else entries.get(id(folder), folder.flushed)
            for name, node in held.items():
                inner = f"{path}/{name}" if path else name
                found.append((inner, node))
                if isinstance(node, _Folder):
                    pending.append((inner, node))
        return found


def _set(folder: "dict[str, _File | _Folder]", entries: "dict[str, _File | _Folder | None]") -> None:
    for name, node in entries.items():
        if node is None:
            folder.pop(name, None)
        else:
            folder[name] = node


def _subsets(count: int) -> "Iterator[Sequence[bool]]":
    if count <= _FEW:
        yield from itertools.product((True, False), repeat=count)
        return
    for one in range(count + 1):
        yield [at < one for at in range(count)]
    for one in range(count):
        yield [at == one for at in range(count)]
        yield [at != one for at in range(count)]


def materialise(tree: Tree, folder: Path) -> None:
    """Writes a state as real files."""
    for path, content in sorted(tree.items()):
        if content is None:
            (folder / path).mkdir(parents=True, exist_ok=True)
        else:
            (folder / path).write_bytes(content)
