"""`megatrain`: the command line. Each verb imports what it needs when it runs; help and refusals load neither torch nor
transformers. Answers go to standard output, everything else to standard error. Exit codes are in `exit_codes.py`.
"""

import argparse
import contextlib
import errno
import os
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

from megatrain import errors
from megatrain.cli import output
from megatrain.cli import parser as arguments
from megatrain.cli.exit_codes import BROKEN, BUG, DONE, REFUSED, STOPPED

_PATH_ERRORS = (
    errno.ENAMETOOLONG,
    errno.EACCES,
    errno.EPERM,
    errno.ELOOP,
    errno.EROFS,
    errno.ENOTDIR,
    errno.ESTALE,
)
"""Error numbers that say something about a path in the request, and nothing about a bug of ours."""


def main(argv: list[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    _open_missing()
    parser = arguments.build()
    args, rest = parser.parse_known_args(argv)
    # argparse takes all positional arguments at once: settings that follow an option are left over.
    for word in rest:
        if word.startswith("-") or "=" not in word or not hasattr(args, "settings"):
            parser.of_verb(args.verb).error(f"unknown argument {word!r}")
        args.settings = [*args.settings, word]
    if args.version:
        from importlib.metadata import PackageNotFoundError, version

        try:
            sys.stdout.write(version("megatrain") + "\n")
        except PackageNotFoundError:
            from megatrain import _core

            sys.stdout.write(_core.__version__ + "\n")
        return DONE
    if args.verb is None:
        parser.print_help()
        return REFUSED
    try:
        return _guarded(args)
    finally:
        _flush()


def _guarded(args: argparse.Namespace) -> int:
    from megatrain.training.stop import RunStopped, StopRequested

    try:
        from megatrain.cli import commands

        code = commands.run(args)
        output.flush()
        return code
    except RunStopped as error:
        return _refuse(args, str(error), BROKEN)
    except errors.DoesNotFit as error:
        return _refuse(args, str(error), REFUSED, needs=error.items)
    except (
        errors.ConfigError,
        errors.CheckpointError,
        errors.DeviceError,
        errors.StorageError,
    ) as error:
        return _refuse(args, str(error), REFUSED)
    except errors.MegatrainError as error:
        return _refuse(args, str(error), BROKEN)
    except BrokenPipeError:
        output.discard(sys.stdout)  # nobody reads the answer any more
        return DONE
    except StopRequested as error:
        return _refuse(args, f"stopped by {error} {_unfinished(args.verb, error.checkpoint)}", STOPPED)
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        return _unexpected(args, error)


def _unfinished(verb: str, checkpoint: Path | None) -> str:
    """What a command had not done when it was stopped, and what there is all the same."""
    if verb != "train":
        return "before it ended, so there is no result"
    if checkpoint is None:
        return "before a step was taken, so there is nothing to save"
    return f"while it loaded, so there is nothing new to save; the newest checkpoint is {checkpoint}"


def _unexpected(args: argparse.Namespace, error: Exception) -> int:
    """The exit code of an exception that is not megatrain's own: the disk's, memory's, a path's, or a bug of ours."""
    from megatrain.system.out_of_memory import is_out_of_memory
    from megatrain.training import out_of_memory
    from megatrain.training.run_dir import DISK_ERRORS

    if is_out_of_memory(error):
        return _refuse(args, out_of_memory.explain(error, "this command"), BROKEN)
    if isinstance(error, OSError) and error.errno in (*DISK_ERRORS, *_PATH_ERRORS):
        full = error.errno in DISK_ERRORS
        if error.filename is None:
            return _refuse(args, f"a file cannot be written: {error.strerror}", BROKEN) if full else _bug(args)
        name = os.fsdecode(error.filename) if not isinstance(error.filename, int) else f"file {error.filename}"
        return _refuse(args, f"{name} cannot be used: {error.strerror}", BROKEN if full else REFUSED)
    return _bug(args)


def _refuse(args: argparse.Namespace, message: str, code: int, **more: Any) -> int:
    """Prints a message and returns the exit code; with `--json` both are the answer too, with `more`."""
    if getattr(args, "json", False):
        with contextlib.suppress(OSError, errors.StorageError):
            output.json_line({"error": message, "exit_code": code, **more})
    paragraph = " ".join(message.split("\n")) if "\n\n" not in message and "\n " not in message else message
    with contextlib.suppress(OSError):
        sys.stderr.write(f"megatrain {args.verb}: {paragraph}\n")
    return code


def _bug(args: argparse.Namespace) -> int:
    text = traceback.format_exc()
    last = text.strip().splitlines()[-1]
    handle, name = tempfile.mkstemp(prefix="megatrain-bug-", suffix=".txt")
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(f"megatrain {' '.join(sys.argv[1:])}\n\n{text}")
    message = f"this is a bug of ours, not a mistake in your request: {last}. The traceback is in {Path(name)}"
    return _refuse(args, f"{message}; please report it with that file.", BUG)


def _open_missing() -> None:
    """Opens standard output and error to nowhere when they were closed (`>&-`): otherwise the next file that is opened
    would take their place and receive what is written to them."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, os.O_WRONLY)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            setattr(sys, name, os.fdopen(number, "w", encoding="utf-8", closefd=False))


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
            continue
        output.discard(stream)
