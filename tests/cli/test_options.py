"""Types of options: what is refused before anything is done."""

from __future__ import annotations

from pathlib import Path

import click
import pytest

from shardwise.cli.options import FILE


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("a-file/x", "a-file is a file, and no folder. Name another file."),
        ("a-file/none/x", "a-file is a file, and no folder. Name another file."),
        ("none/x", "the folder {}/none does not exist. Make it, or name another file."),
    ],
)
def test_a_file_to_write_lies_in_a_folder(name: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "a-file").touch()
    with pytest.raises(click.BadParameter) as caught:
        FILE.convert(str(tmp_path / name), None, None)
    assert caught.value.message.endswith(reason.format(tmp_path))
