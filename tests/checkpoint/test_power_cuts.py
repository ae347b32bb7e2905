"""Every state in which a power cut can leave a disk while checkpoints are saved, replaced, removed and exported.

A process with a watched disk does it once and its calls are recorded. They are replayed on a simulated disk
(`support/crash_states.py`), which gives each state that can be left after each call. What must hold in all of them:
under a name that was given by a rename is all that was renamed to it, or all that had that name before; and what was
reported saved is there.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from megatrain.checkpoint import checkpoint
from megatrain.system.atomic import leftovers
from support import faulty_disk
from support.crash_states import Call, Disk, Tree, materialise, read_calls
from support.runs import settings
from support.trainer import assert_bit_equal, fit

SAVES = """
    from megatrain.training.run_dir import RunFolder
    (folder / "watched").mkdir()
    record(folder / "record", folder / "watched")
    run = RunFolder(folder / "watched" / "run")
    engine = started("bf16", False)
    for step in (1, 2):
        engine.step(batches(step, 3))
        engine.save(run.checkpoint(step), {"step": step}, step=step)
        mark(f"kept run/checkpoints/step-{step}")
    mark("released run/checkpoints/step-1")
    run.retain(1, set())
    engine.save(run.checkpoint(2), {"again": True}, step=2)  # takes the place of the one before
    mark("kept run/checkpoints/step-2")
    """

EXPORTS = """
    from megatrain.checkpoint.export import export_checkpoint
    (folder / "watched").mkdir()
    engine = started("bf16", False)
    engine.save(folder / "step-0", step=0)
    record(folder / "record", folder / "watched")
    for step in (1, 2):
        engine.step(batches(step, 3))
        engine.save_pretrained(folder / "watched" / "deep" / "out", overwrite=True)
        mark("kept deep/out")
    export_checkpoint(folder / "step-0", folder / "watched" / "other")
    mark("kept other")
    """

FILES = """
    from megatrain.system.atomic import published, recover, write_whole
    watched = folder / "watched"
    watched.mkdir()
    record(folder / "record", watched)
    for text in ("one", "another"):
        write_whole(watched / "status.json", text * 100)
        mark("kept status.json")
    with published(watched / "cache" / "entry") as temporary:
        (temporary / "inner").mkdir()
        (temporary / "inner" / "file").write_text("text" * 100)
    mark("kept cache/entry")
    # as by a process that was killed between two renames
    (watched / "cache" / "entry").rename(watched / "cache" / ".old-entry")
    recover(watched / "cache" / "entry")
    mark("kept cache/entry")
    """

RUN = """
    from megatrain.training import async_save
    from support.runs import settings
    from support.trainer import fit
    (folder / "watched").mkdir()
    record(folder / "record", folder / "watched")
    completed = async_save.CheckpointWriter._completed

    def marked(self, step, kept):
        mark(f"kept run/checkpoints/step-{step}")
        if step > 1:
            mark(f"released run/checkpoints/step-{step - 1}")
        completed(self, step, kept)

    async_save.CheckpointWriter._completed = marked
    output = {"dir": str(folder / "watched" / "run"), "save_every": 1, "keep": 1, "export": "auto"}
    fit(settings(folder, train={"steps": 3}, output=output))
    mark("kept run/export")
    """


def recorded(disk: Path, folder: Path, body: str) -> list[Call]:
    """The calls of a process. They are all that it made: their replay gives what it left."""
    faulty_disk.run(disk, folder, body)
    watched = folder / "watched"
    calls = read_calls(folder / "record")
    replayed = Disk(str(watched))
    for call in calls:
        replayed.apply(call)
    paths = watched.rglob("*")
    assert replayed.contents() == {
        path.relative_to(watched).as_posix(): path.read_bytes() if path.is_file() else None for path in paths
    }
    return calls


@pytest.fixture(scope="module")
def saves(disk: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Call]:
    """The calls of `SAVES`."""
    return recorded(disk, tmp_path_factory.mktemp("saves"), SAVES)


def root_of(calls: Sequence[Call]) -> str:
    path = calls[0].path
    return path[: path.index("/watched") + len("/watched")]


def content(tree: Tree, name: str) -> Tree:
    """A file, or a folder with all that is in it, by paths relative to it."""
    return {path[len(name) :]: found for path, found in tree.items() if path == name or path.startswith(f"{name}/")}


class Promises:
    """What must be found under the names that renames have given, as the calls of a process go by."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._contents: dict[str, list[Tree]] = {}
        """All that was renamed to a name, oldest first."""
        self._kept: dict[str, int] = {}
        """Names that must be there, and the oldest content that may be."""

    def note(self, call: Call, before: Tree) -> None:
        """A call, and what a program saw before it."""
        if call.name == "mark":
            what, name = call.path.split()
            if what == "kept":
                self._kept[name] = len(self._contents[name]) - 1
            else:
                del self._kept[name]
        elif call.name == "rename":
            source, name = (Path(path).relative_to(self._root).as_posix() for path in (call.path, call.to))
            if not Path(name).name.startswith("."):
                self._contents.setdefault(name, []).append(content(before, source))

    def broken(self, tree: Tree) -> str | None:
        """The first promise that a state breaks."""
        for name, contents in self._contents.items():
            aside = str(Path(name).with_name(f".old-{Path(name).name}"))
            oldest = self._kept.get(name)
            found = [content(tree, one) for one in (name, aside) if one in tree]
            if oldest is not None and not found:
                return f"{name} was saved and is lost"
            allowed = contents if oldest is None else contents[oldest:]
            # Where both are there the one moved aside is about to be removed, and may be so in part.
            if found and found[0] not in allowed:
                return f"{name} is in part, or older than what was saved"
        return None


def first_broken(root: str, calls: Sequence[Call], begin: int = 0) -> str | None:
    """The first promise that a power cut after call `begin`, or after any later one, can break."""
    return next((f"after {call}: {broken}" for call, _, broken in states(root, calls, begin) if broken), None)


def states(root: str, calls: Sequence[Call], begin: int = 0) -> Iterator[tuple[Call, Tree, str | None]]:
    """Each state that a power cut can leave after each call from `begin` on, and which promise it breaks."""
    disk, promises = Disk(root), Promises(root)
    for number, call in enumerate(calls):
        promises.note(call, disk.contents() if call.name == "rename" else {})
        disk.apply(call)
        if number >= begin:
            for tree in disk.crash_states():
                yield call, tree, promises.broken(tree)


def assert_every_flush_is_needed(root: str, calls: Sequence[Call]) -> None:
    """No power cut breaks a promise; without any one flush, or with a rename before the flushes of what it renames, one
    does."""
    assert first_broken(root, calls) is None
    flushes = [number for number, call in enumerate(calls) if call.name.startswith("sync")]
    assert len(flushes) > 5
    for number in flushes:
        without = [*calls[:number], *calls[number + 1 :]]
        assert first_broken(root, without, number) is not None, f"nothing is lost without: {calls[number]}"
    for number, call in enumerate(calls):
        if call.name == "rename" and Path(call.path).name.startswith(".tmp-"):
            inside = [n for n in flushes if n < number and calls[n].path.startswith(call.path)]
            begin = max(n for n in range(number) if calls[n].name == "write" and calls[n].path.startswith(call.path))
            late = [n for n in inside if n > begin]
            moved = [Call(calls[n].name, calls[n].path.replace(call.path, call.to)) for n in late]
            kept = [calls[n] for n in range(number) if n not in late]
            turned = [*kept, call, *moved, *calls[number + 1 :]]
            assert first_broken(root, turned, len(kept)) is not None, f"nothing is lost with an early: {call}"


def test_a_power_cut_loses_no_checkpoint_and_each_flush_is_needed_for_that(saves: list[Call]) -> None:
    assert_every_flush_is_needed(root_of(saves), saves)


@pytest.mark.parametrize("body", [EXPORTS, FILES], ids=["exports", "files"])
def test_a_power_cut_loses_no_export_and_no_file_and_each_flush_is_needed_for_that(
    disk: Path, tmp_path: Path, body: str
) -> None:
    assert_every_flush_is_needed(str(tmp_path / "watched"), recorded(disk, tmp_path, body))


def test_retention_before_the_new_checkpoint_is_in_its_place_loses_one(saves: list[Call]) -> None:
    """The order that retention must keep, turned round."""
    released = next(n for n, call in enumerate(saves) if str(call) == "mark released run/checkpoints/step-1")
    end = next(n for n, call in enumerate(saves) if call.name == "remove" and call.path.endswith("/.removing-step-1"))
    place = next(n for n, call in enumerate(saves) if call.name == "rename" and call.to.endswith("/step-2"))
    removal = saves[released + 1 : end + 1]
    broken = first_broken(root_of(saves), [*saves[:place], *removal, *saves[place:released]], place)
    assert broken == f"after {removal[0]}: run/checkpoints/step-1 was saved and is lost"


def test_a_run_goes_on_bit_for_bit_from_every_state_that_a_power_cut_can_leave(disk: Path, tmp_path: Path) -> None:
    root = tmp_path / "watched"
    calls = recorded(disk, tmp_path, RUN)
    finished = root / "run" / "checkpoints" / "step-3"
    # States that differ in what is there, in whole or in part, and not only in bytes of what is not in its place yet.
    kinds: dict[frozenset[tuple[str, bool]], Tree] = {}
    count = 0
    for call, tree, broken in states(str(root), calls):
        assert broken is None, f"after {call}: {broken}"
        count += 1
        places = ("run/checkpoints", "run/export", "run/.old-export")
        inside = [(path, not data) for path, data in tree.items() if path.startswith(places) and "/.tmp" not in path]
        kinds[frozenset(inside)] = tree
    assert count > 10_000
    newest: dict[str, list[Path]] = {}
    for number, tree in enumerate(kinds.values()):
        folder = tmp_path / "states" / str(number)
        folder.mkdir(parents=True)
        materialise(tree, folder)
        found = checkpoint.latest_complete(folder / "run") if (folder / "run").is_dir() else None
        assert found is None or checkpoint.verify(found) == []
        newest.setdefault("" if found is None else found.name, []).append(folder / "run")
    assert newest.keys() == {"", "step-1", "step-2", "step-3"}
    for runs in newest.values():
        # of those from which it goes on in the same place, the one that holds most
        run = max(runs, key=lambda run: len(list(run.rglob("*"))))
        output = {"dir": str(run), "save_every": 1, "keep": 1, "export": "auto"}
        assert fit(settings(tmp_path, train={"steps": 3}, output=output)).step == 3
        assert_bit_equal(run / "checkpoints" / "step-3", finished)
        assert not leftovers(run, "*")
        assert not leftovers(run / "checkpoints", "*")


def test_what_recovers_from_a_power_cut_may_be_cut_off_too(disk: Path, tmp_path: Path) -> None:
    """A run's folder as a power cut between two renames leaves it: opened, cleared, and the power cut again."""
    body = """
        from megatrain.training.run_dir import RunFolder
        run = folder / "watched" / "run"
        engine = started("bf16", False)
        for step in (1, 2):
            engine.save(run / "checkpoints" / f"step-{step}", step=step)
        (run / "lock").write_text("process 1")
        place = run / "checkpoints"
        (place / "step-2").rename(place / ".old-step-2")
        shutil.copytree(place / "step-1", place / ".removing-step-1")
        shutil.copytree(place / "step-1", place / ".tmp-step-3")
        (place / ".tmp-step-3" / "state.json").unlink()
        shutil.copytree(folder / "watched", folder / "before")
        record(folder / "record", folder / "watched")
        opened = RunFolder(run)
        opened.clear_leftovers()
        assert sorted(path.name for path in place.iterdir()) == ["step-1", "step-2"]
        """
    faulty_disk.run(disk, tmp_path, body)
    before = {
        path.relative_to(tmp_path / "before").as_posix(): path.read_bytes() if path.is_file() else None
        for path in (tmp_path / "before").rglob("*")
    }
    simulated = Disk(str(tmp_path / "watched"), before)
    first, second = content(before, "run/checkpoints/step-1"), content(before, "run/checkpoints/.old-step-2")
    count = 0
    for call in read_calls(tmp_path / "record"):
        simulated.apply(call)
        for tree in simulated.crash_states():
            count += 1
            assert content(tree, "run/checkpoints/step-1") == first
            held = [content(tree, f"run/checkpoints/{name}") for name in ("step-2", ".old-step-2")]
            assert second in held, f"after {call}"
            assert {} in held
    assert count > 20
