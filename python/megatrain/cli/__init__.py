"""`megatrain`: the command line. Each verb imports what it needs when it runs; help and refusals load neither torch nor
transformers. Answers go to standard output, everything else to standard error.

Exit codes: 0 done; 2 wrong request or does not fit; 3 stopped on request with the last finished step on disk; 4 the run
stopped itself, last good checkpoint named; 130/143 second signal; 1 a bug of ours.
"""

import argparse
import contextlib
import errno
import os
import sys
import tempfile
import traceback
from pathlib import Path

from megatrain.cli import output
from megatrain.cli import parser as arguments

DONE, BUG, REFUSED, STOPPED, BROKEN = 0, 1, 2, 3, 4

_OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EIO)
_OF_THE_SYSTEM = (
    *_OF_THE_DISK,
    *(errno.ENAMETOOLONG, errno.EACCES, errno.EPERM, errno.ELOOP, errno.EROFS, errno.ENOTDIR, errno.ESTALE),
)
"""What the system says of a path, whoever asks; the request is answered for it, and no bug is looked for."""


def main(argv: list[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    _open_missing()
    parser = arguments.build()
    args, rest = parser.parse_known_args(argv)
    # argparse takes all positionals in one go: settings that follow an option are left over.
    for word in rest:
        if word.startswith("-") or "=" not in word or not hasattr(args, "settings"):
            parser.error(f"unknown argument {word!r}")
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
    from megatrain import errors
    from megatrain.training.stop import RunStopped, StopRequested

    try:
        from megatrain.cli import commands

        code = commands.run(args)
        output.flush()
        return code
    except RunStopped as error:
        return _refuse(args, str(error), BROKEN)
    except (
        errors.ConfigError,
        errors.DoesNotFit,
        errors.CheckpointError,
        errors.DeviceError,
        errors.StorageError,
    ) as error:
        return _refuse(args, str(error), REFUSED)
    except errors.MegatrainError as error:
        return _refuse(args, str(error), BROKEN)
    except BrokenPipeError:
        output.discard(sys.stdout)  # the reader has left; so do we
        return DONE
    except StopRequested as error:
        return _refuse(args, f"stopped by {error} before a step was taken; nothing was left to save", STOPPED)
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        if error.filename is None or error.errno not in _OF_THE_SYSTEM:
            return _bug(args)
        name = os.fsdecode(error.filename) if not isinstance(error.filename, int) else f"file {error.filename}"
        code = BROKEN if error.errno in _OF_THE_DISK else REFUSED
        return _refuse(args, f"{name} cannot be used: {error.strerror}", code)
    except Exception:  # whatever else it is, it is ours
        return _bug(args)


def _refuse(args: argparse.Namespace, message: str, code: int) -> int:
    paragraph = " ".join(message.split("\n")) if "\n\n" not in message and "\n " not in message else message
    with contextlib.suppress(OSError):
        sys.stderr.write(f"megatrain {args.verb}: {paragraph}\n")
    return code


def _bug(args: argparse.Namespace) -> int:
    text = traceback.format_exc()
    handle, name = tempfile.mkstemp(prefix="megatrain-bug-", suffix=".txt")
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(f"megatrain {' '.join(sys.argv[1:])}\n\n{text}")
    last = text.strip().splitlines()[-1]
    with contextlib.suppress(OSError):
        sys.stderr.write(
            f"megatrain {args.verb}: this is a bug of ours, not of your request: {last}. "
            f"The traceback is in {Path(name)}; please report it with that file.\n"
        )
    return BUG


def _open_missing() -> None:
    """Standard output or error that was closed (`>&-`) goes nowhere, instead of into the next file that is opened."""
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
