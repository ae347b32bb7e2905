"""A process that is killed, and a disk that fails, at each call that a save, retention, an export and a load make."""

import os
from pathlib import Path

import pytest

from support import faulty_disk
from support.hangs import HANG_SECONDS

KILLS = int(os.environ.get("MEGATRAIN_TEST_KILLS", "25"))
"""At how many named points runs are killed; `make test-crash` asks for all of them."""


@pytest.mark.timeout(2 * HANG_SECONDS + 60 * KILLS)
def test_a_run_killed_at_a_named_point_goes_on_bit_for_bit(disk: Path, tmp_path: Path) -> None:
    """A point is a call and the file or folder that it is about. Each is met by name, whichever thread comes to it."""
    body = f"""
        from support.crash_states import read_calls
        from support.runs import settings
        from support.trainer import assert_bit_equal, fit
        # what a run imports, once for all of them
        import tokenizers
        from megatrain.checkpoint import export
        from megatrain.data import dataset, loader, train_tokenizer
        from megatrain.training import loop, sampling, setup
        from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

        def train(name, before=lambda: None, keep=1):
            # in a process of its own, and no thread has been started in this one
            process = os.fork()
            if process:
                return os.waitpid(process, 0)[1]
            output = {{"dir": str(folder / name / "run"), "save_every": 1, "keep": keep, "export": "auto"}}
            config = settings(folder, train={{"steps": 3}}, output=output)
            before()
            fit(config)
            os._exit(0)

        def watch():
            record(folder / "record", folder / "whole")

        assert train("whole", watch) == 0
        assert train("all", keep=9) == 0
        steps = folder / "all" / "run" / "checkpoints"
        calls = [call for call in read_calls(folder / "record") if "/run/" in call.path]
        points = list(dict.fromkeys((call.name, call.path.partition("/whole/")[2]) for call in calls))
        assert len(points) > 100, len(points)
        # those that decide what is where, and of the others as many as are asked for
        decisive = [point for point in points if point[0] == "rename" and "json" not in point[1]]
        others = [point for point in points if point not in decisive]
        wanted = min({KILLS}, len(points))
        assert wanted > len(decisive)
        gap = len(others) / (wanted - len(decisive))
        chosen = decisive + [others[int(number * gap)] for number in range(wanted - len(decisive))]
        newest = []
        for number, (call, path) in enumerate(chosen):
            place = folder / str(number) / "run" / "checkpoints"

            def armed():
                disk.disk_watch(str(folder / str(number)).encode())
                kill_at(call, path)

            status = train(str(number), armed)
            assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, (call, path, status)
            found = checkpoint.latest_complete(place.parent)
            if found is not None:
                assert checkpoint.verify(found) == [], (call, path)
                assert_bit_equal(found, steps / found.name.removeprefix(".old-"))
            newest.append(None if found is None else found.name)
            assert train(str(number)) == 0, (call, path)
            assert_bit_equal(place / "step-3", steps / "step-3")
            shutil.rmtree(folder / str(number))
        assert {{None, "step-1", "step-2", "step-3"}} <= set(newest), newest
        print(len(chosen), len(points))
        """
    killed, points = map(int, faulty_disk.run(disk, tmp_path, body, timeout=HANG_SECONDS + 60 * KILLS).split())
    assert killed == min(KILLS, points)


def test_an_error_of_any_call_of_a_save_or_an_export_leaves_what_was_there_and_the_engine(
    disk: Path, tmp_path: Path
) -> None:
    body = """
        import errno
        engine = started("bf16", False)
        engine.step(batches(0, 3))
        engine.save(place / "step-1", {"which": 1}, step=1)
        disk.disk_watch(str(folder / "run").encode())
        out = folder / "run" / "out"

        def save():
            engine.save(place / "step-2", {"which": 2}, step=2)

        def export():
            engine.save_pretrained(out, overwrite=True)

        def files(where):
            return {path.name: path.read_bytes() for path in where.iterdir()} if where.exists() else None

        counts = []
        for write, target in ((save, place / "step-2"), (save, place / "step-2"), (export, out), (export, out)):
            before = files(target)  # nothing the first time, then one that is replaced
            arm()
            write()
            after, total = files(target), disk.disk_operations()
            for number in range(total):
                for code in (errno.ENOSPC, errno.EIO):
                    shutil.rmtree(target)
                    if before is not None:
                        target.mkdir()
                        for name, data in before.items():
                            (target / name).write_bytes(data)
                    fail(number, code)
                    try:
                        write()
                    except StorageError as error:
                        assert str(folder) in str(error) and os.strerror(code) in str(error), (number, code, str(error))
                        assert files(target) in (before, after), (number, error)
                    else:
                        assert files(target) == after, number
                    arm()
                    # what could not be removed, because that call failed, goes with the next attempt
                    write()
                    left = {path.name for path in target.parent.iterdir() if path.name.startswith(".")}
                    assert not left, (number, left)
                    assert checkpoint.verify(place / "step-1") == []
            counts.append(total)
        other = started("bf16", False)
        for step in range(3):
            other.step(batches(step, 3))
        for step in range(1, 3):
            engine.step(batches(step, 3))
        assert same(state(engine), state(other))
        print(min(counts))
        """
    assert int(faulty_disk.run(disk, tmp_path, body)) > 10


def test_a_read_that_fails_is_short_or_has_a_flipped_bit_is_refused_or_does_not_show(
    disk: Path, tmp_path: Path
) -> None:
    body = """
        import errno
        from megatrain.checkpoint.export import export_checkpoint
        engine = started("bf16", False)
        engine.step(batches(0, 3))
        engine.save(place / "step-1", step=1)
        wanted = state(engine)
        other = started("bf16", False, seed=1)

        def load():
            other.load(place / "step-1")
            return same(state(other), wanted)

        def export():
            out = folder / "out"
            shutil.rmtree(out, ignore_errors=True)
            export_checkpoint(place / "step-1", out, dtype="fp32")
            return (out / "model.safetensors").read_bytes()

        disk.disk_watch(str(place).encode())
        counts = []
        for read, hows in ((load, (errno.EIO, -1, -2)), (export, (errno.EIO, -1))):
            spoil_read(-1, 0)
            whole = read()
            assert whole
            total = disk.disk_reads()
            refused = 0
            for number in range(total):
                for how in hows:
                    spoil_read(number, how)
                    try:
                        assert read() == whole, (number, how)
                    except (CheckpointError, StorageError) as error:
                        refused += 1
                        assert how != -1, (number, error)
                        assert str(place / "step-1") in str(error), error
                    else:
                        assert how != errno.EIO, number
            counts.append((total, refused))
        print(*counts[0])
        """
    reads, refused = map(int, faulty_disk.run(disk, tmp_path, body).split())
    assert reads > 10
    assert refused > reads + 5, "each read that fails, and most of those with another bit"
