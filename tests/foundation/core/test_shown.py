"""Commands in messages can be pasted into a shell: python -m pytest tests/foundation/core/test_shown.py"""

import re
import shlex
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from cli import app
from compress.commands.init import write_copy
from compress.report.document import Report
from foundation.artifacts.safetensors import CONVERT
from foundation.core.errors import InputError
from foundation.core.shown import pasted
from triton_repo import control

ROOT = Path(__file__).parents[3]
ODD = "my run $(touch x) 'a'"


@given(st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])), min_size=1))
def test_a_shell_reads_the_words_that_were_given(words: list[str]) -> None:
    assert shlex.split(pasted(*words)) == words


def test_no_message_puts_a_path_into_a_command_by_itself() -> None:
    """Every command with a value in it is written by `pasted`."""
    verbs = "|".join(str(command.name or command.callback.__name__) for command in app.registered_commands if command.callback)
    written = re.compile(rf"(`|# |: |\")compress ({verbs}) [^\"'`\n]*\{{(?!pasted)")
    folders = ("compress", "foundation", "quantize", "distill", "prune", "export", "triton_repo")
    files = [ROOT / "cli.py", *(file for folder in folders for file in (ROOT / folder).rglob("*.py"))]
    assert [f"{file}: {line}" for file in files for line in file.read_text().splitlines() if written.search(line)] == []


def commands(text: str) -> list[list[str]]:
    return [
        shlex.split(command)
        for command in re.findall(r"`(compress [^`]*)`|(?:# |run: )(compress .*)", text)
        for command in command
        if command
    ]


def test_commands_with_paths_that_a_shell_would_read_otherwise(tmp_path: Path) -> None:
    folder = tmp_path / ODD
    folder.mkdir()
    file = folder / "r.yaml"
    result = CliRunner().invoke(app, ["init", "--task", "text-classification", "-o", str(file)])
    assert commands(result.stdout) == [["compress", "plan", str(file)]]
    assert ["compress", "run", str(file)] in commands(file.read_text())
    file.unlink()
    write_copy("quickstart", file)
    assert ["compress", "run", str(file)] in commands(file.read_text())
    (folder / "report.json").write_text("{")
    with pytest.raises(InputError) as caught:
        Report.load(folder)
    assert commands(str(caught.value.lines[0])) == [["compress", "report", str(folder)]]
    with pytest.raises(InputError) as caught:
        control.ask(folder, {}, print)
    assert commands(str(caught.value.lines[0])) == [["compress", "serve", str(folder)]]


def test_the_conversion_of_pickles_is_python_with_the_path_in_it() -> None:
    program, option, code = shlex.split(pasted("python", "-c", CONVERT.format(ODD, f"{ODD}-safetensors")))
    assert (program, option) == ("python", "-c")
    compile(code, "code", "exec")
    assert repr(ODD) in code
