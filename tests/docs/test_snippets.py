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
REFERENCE = ROOT / "docs" / "reference"
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page, language):
    return [text for kind, text in FENCE.findall(page.read_text()) if kind == language]


def name(page):
    return str(page.relative_to(ROOT))


PROGRAMS = [page for page in PAGES if blocks(page, "python")]
# `init` can be called once only.
TOGETHER = [page for page in PROGRAMS if page.parent == REFERENCE and page.stem != "init"]
ALONE = [page for page in PROGRAMS if page not in TOGETHER]


def write_program(page, folder):
    """Writes the program of a page."""
    path = folder / f"{page.stem}.py"
    path.write_text("\n".join(blocks(page, "python")))
    return path


def printed_by(rank, result):
    lines = result.stdout.splitlines()
    return [line[4:] for line in lines if line.startswith(f"[{rank}]")]


def shows(page, printed):
    """Whether lines hold the output of a page; libraries may print some of their own in between."""
    shown = "".join(blocks(page, "output")).splitlines()
    return [line for line in printed if line in shown] == shown


@pytest.mark.parametrize("page", ALONE, ids=name)
def test_programs_run_and_print_what_is_shown(page, tmp_path):
    result = jobs.run_script(write_program(page, tmp_path), ranks=2, timeout=300)
    assert result.returncode == 0, result.stderr
    assert all(shows(page, printed_by(rank, result)) for rank in range(2)), result.stdout


def test_reference_programs_run_and_print_what_is_shown(tmp_path):
    """One job runs them all: most of the time of each would be the start of Python."""
    paths = [str(write_program(page, tmp_path)) for page in TOGETHER]
    program = tmp_path / "all.py"
    program.write_text(
        "import runpy\n"
        f"for path in {paths}:\n"
        "    print('page', path)\n"
        "    runpy.run_path(path)\n"
        "    from multimesh.jax import clear_tasks\n"
        "    clear_tasks()\n"
    )
    result = jobs.run_script(program, ranks=2, timeout=300)
    assert result.returncode == 0, result.stderr
    for rank in range(2):
        printed = "\n".join(printed_by(rank, result)).split("page ")[1:]
        assert [part.splitlines()[0] for part in printed] == paths
        for page, part in zip(TOGETHER, printed, strict=True):
            assert shows(page, part.splitlines()), part


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


def test_every_function_has_a_page():
    from multimesh import jax
    from multimesh.jax import flax

    # What docs/api.md and docs/checkpoints.md are about.
    told = {"Task", "TaskMesh", "Weighted", "clear_tasks", "fetch", "prefetch"}
    told |= {"GlobalStep", "LocalStep", "parallelize_eval", "parallelize_step"}
    functions = {*jax.__all__, *flax.__all__} - told
    assert functions | {"init", "replicate_inputs"} == {page.stem for page in REFERENCE.glob("*")}


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
