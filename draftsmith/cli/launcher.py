"""The process that `--launch` starts. It runs `accelerate launch`, passes signals on to it, and ends when its parent ends.

python -m draftsmith.cli.launcher TRAIN_FOLDER --config_file FILE train/head.py --recipe R
"""

import logging
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import FrameType

import psutil
from accelerate.commands.launch import launch_command, launch_command_parser
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from draftsmith.train.checkpoints import latest_checkpoint
from draftsmith.train.process import ENDING, LOST, end_with_parent, on_signals


def main() -> int:
    """Launch, and return the exit code of the first process that failed."""
    end_with_parent()
    folder, *words = sys.argv[1:]
    arguments = launch_command_parser().parse_args(words)
    # torchrun's own handlers would kill the processes half a minute later, whether they have saved a checkpoint or not.
    arguments.signals_to_handle = "SIGQUIT"
    arguments.quiet = False  # by which a single process's exit code is lost; there is nothing else to be quiet about
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)

    def hand_on(number: int, _: FrameType | None) -> None:
        for child in psutil.Process().children():  # which save a checkpoint and end
            child.send_signal(number)

    try:
        with on_signals(hand_on, (signal.SIGINT, *ENDING)):
            launch_command(arguments)
    except ChildFailedError as error:
        # Why training processes ended where they could not print it themselves.
        for rank, failure in error.failures.items():
            if failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM:
                _tell_end(f"Rank {rank}", -failure.exitcode, folder)
                return 1
        codes = [failure.exitcode for failure in error.failures.values() if failure.exitcode > 0]
        if set(codes) <= {LOST}:
            for failure in error.failures.values():
                if isinstance(failure.message, dict):
                    print(f"draftsmith: {failure.message['message']}", file=sys.stderr)
                    break
            return 1
        return next(code for code in codes if code != LOST)  # has said why
    except subprocess.CalledProcessError as error:  # of a single process
        if error.returncode < 0 and error.returncode != -signal.SIGTERM:
            _tell_end("The process", -error.returncode, folder)
        return max(1, error.returncode)
    except (ConnectionError, ValueError, ImportError) as error:
        print(f"draftsmith: `accelerate launch` did not start ({error}): change the launch file.", file=sys.stderr)
        return 2
    return 0


def _tell_end(who: str, number: int, folder: str) -> None:
    name = signal.Signals(number).name
    memory = ", as the system does when memory is short" if name == "SIGKILL" else ""
    start = latest_checkpoint(Path(folder), warn=False) or "what is done; there is no checkpoint yet"
    what = f"{who} on {socket.gethostname()} was ended by {name}{memory}"
    print(f"draftsmith: {what}: run the same command again to go on from {start}.", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
