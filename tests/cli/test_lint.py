"""``shardwise lint``: what is printed of several files."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.cli import main


def test_files_that_cannot_be_read_do_not_hide_the_defects_of_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.py").write_text("x = 1\ndef (:\n")
    Path("b.py").write_text("x = " + " + ".join(["1"] * 20_000))
    Path("c.json").write_text("[" * 2_000 + "]" * 2_000)
    Path("d.yaml").write_text("a: !!python/name:os.system\n")
    Path("e.py").write_text("for x in rows:\n    loss.backward()\n    optimizer.step()\n")
    with pytest.raises(SystemExit) as caught:
        main(["lint", "a.py", "b.py", "c.json", "d.yaml", "e.py"])
    out, error = capsys.readouterr()
    assert caught.value.code == 1
    why = ["invalid syntax", *["it is nested too deeply"] * 2, "could not determine a constructor"]
    for line, name, reason in zip(
        error.splitlines(), ["a.py:2", "b.py", "c.json", "d.yaml:1"], why, strict=True
    ):
        assert line.startswith(f"error: {name} cannot be read as its suffix says: {reason}")
    assert out.startswith("e.py:2: D36 ")
    assert out.endswith("rules, 1 file, 4 not read\n")
