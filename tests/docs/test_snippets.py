"""What the pages promise is true: programs run and print what is shown, links and commands exist.

The `python` blocks of a page are one program. Its `output` block is what each rank prints.
"""

import re
import subprocess
import sys
import tomllib

import pytest
from support import jobs

from multimesh import config

ROOT = jobs.REPOSITORY
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/**/*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page, language):
    return [text for kind, text in FENCE.findall(page.read_text()) if kind == language]


def name(page):
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=name)
def test_programs_run_and_print_what_is_shown(page, tmp_path):
    program = tmp_path / "train.py"
    program.write_text("\n".join(blocks(page, "python")))
    result = jobs.run_script(program, ranks=2, timeout=300)
    assert result.returncode == 0, result.stderr
    shown = "".join(blocks(page, "output")).splitlines()
    for rank in range(2):
        printed = [line[4:] for line in result.stdout.splitlines() if line.startswith(f"[{rank}]")]
        # Libraries may print lines of their own in between.
        assert [line for line in printed if line in shown] == shown


def test_the_first_program_runs_in_one_process(tmp_path):
    program = tmp_path / "train.py"
    program.write_text("\n".join(blocks(ROOT / "README.md", "python")))
    result = subprocess.run(
        [sys.executable, program],
        env=jobs.clean_environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    expected = blocks(ROOT / "README.md", "output")[0]
    assert result.stdout.splitlines()[-1] == expected.splitlines()[-1]


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page):
    targets = re.findall(r"\]\(([^)#:]+)\)", page.read_text())
    assert [target for target in targets if not (page.parent / target).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_commands_name_what_exists(page):
    shell = "\n".join(blocks(page, "sh"))
    extras = {extra for found in re.findall(r"\.\[([\w,]+)\]", shell) for extra in found.split(",")}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert extras <= project["optional-dependencies"].keys()
    files = re.findall(r"\b(?:examples|scripts|tests|benchmarks)/[\w/.-]+", shell)
    assert [file for file in files if not (ROOT / file).exists()] == []


def test_ci_runs_the_command_that_readers_are_told():
    _, command, *_ = blocks(ROOT / "README.md", "sh")
    script = (ROOT / ".ci" / "run").read_text()
    assert command.strip().replace(" && ", "\n") in script


def test_every_environment_variable_is_documented():
    page = (ROOT / "docs" / "launching.md").read_text()
    documented = re.findall(r"^\| `(MULTIMESH_\w+)`", page, re.MULTILINE)
    assert sorted(documented) == sorted(re.findall(r"\bMULTIMESH_\w+", config.__doc__))


def test_every_option_of_mmrun_is_documented():
    command = [sys.executable, ROOT / "scripts" / "mmrun", "--help"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    options = set(re.findall(r"^ +(--[\w-]+)", shown, re.MULTILINE))
    assert "--log-dir" in options
    page = (ROOT / "docs" / "launching.md").read_text()
    assert options - {"--help"} == set(re.findall(r"^\| `(--[\w-]+)", page, re.MULTILINE))
