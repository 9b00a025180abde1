"""One file of output per rank: `mmrun --log-dir DIR`.

A file has the lines that the rank wrote to its standard output and error, in the order in which
they came, without the rank in front. Each is written at once, so that `tail -f` follows it, and
a crash loses nothing. A file that exists is continued: a job that is queued again after a
preemption must not erase what it had said before.
"""

import os
from pathlib import Path

from multimesh.errors import StartupError

__all__ = ["Logs"]


class Logs:
    """The files of a job."""

    def __init__(self, folder: str, size: int):
        """Opens the files `rank-0.log` to `rank-<size - 1>.log`, padded so that they sort.

        Args:
          folder: Where; it is made if need be.
          size: The number of ranks.

        Raises:
          StartupError: If the folder or a file cannot be written.
        """
        width = len(str(size - 1))
        self._paths = [Path(folder) / f"rank-{rank:0{width}}.log" for rank in range(size)]
        self._files: dict[int, int] = {}
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            for rank, path in enumerate(self._paths):
                self._files[rank] = os.open(
                    path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666
                )
        except OSError as error:
            self.close()
            raise StartupError(
                f"--log-dir: cannot write {error.filename}: {error.strerror}. Expected a folder "
                "that this user may write to, with room for one open file per rank."
            ) from error

    def write(self, rank: int, lines: bytes) -> str | None:
        """Adds lines to a rank's file.

        Returns:
          None, or why the file cannot be written; it is then left alone. A full disk is no
          reason to lose the job as well.
        """
        if rank not in self._files:
            return None
        try:
            while lines:
                lines = lines[os.write(self._files[rank], lines) :]
        except OSError as error:
            os.close(self._files.pop(rank))
            return f"no more output of rank {rank} in {self._paths[rank]}: {error.strerror}"
        return None

    def close(self):
        """Closes the files."""
        while self._files:
            os.close(self._files.popitem()[1])
