"""File names that may come from somebody else's index: plain ones, inside the folder.

An index says which file holds a tensor. One that was made to do harm says ``../../.ssh/id_rsa``,
an absolute path, or a link that leads there. Everything that names a file passes here.
"""

from __future__ import annotations

from pathlib import Path

from shardwise.errors import CheckpointError

__all__ = ["inside", "is_plain"]


def is_plain(name: object) -> bool:
    """Is it a name of a file in a folder, and nothing more?"""
    return (
        isinstance(name, str)
        and 0 < len(name) <= 255
        and name not in (".", "..")
        and name.isprintable()
        and not set(name) & set("/\\:")
    )


def inside(folder: Path, name: object) -> Path:
    """The file of this name in ``folder``.

    A link must lead to a file in the same folder, or to Hugging Face's own store of files, as in
    ``models--…/snapshots/…/model.safetensors → ../../blobs/…``.

    Raises:
        CheckpointError: the name is not plain, a link leads elsewhere or in a circle, or the
            folder may not be looked at.
    """
    if not is_plain(name):
        raise CheckpointError(
            f"{folder} names {name!r:.80} as one of its files. That is no plain file name, so it "
            "could be any file of this machine; it is not read. Do not trust this folder."
        )
    path = folder / str(name)
    try:
        real = path.resolve() if path.is_symlink() else None
        home = folder.resolve() if real else folder
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links, in Python's words
        raise CheckpointError(
            f"{path} could not be looked at: {error}. Look at its permissions and at where its "
            "links lead, or copy the file to where the link is."
        ) from error
    cached = home.parent.name == "snapshots" and home.parent.parent / "blobs"
    if real and real.parent not in (home, cached):
        raise CheckpointError(
            f"{path} is a link out of its folder, to {real}, and is not read. Do not trust "
            "this folder, or copy the file to where the link is."
        )
    return path
