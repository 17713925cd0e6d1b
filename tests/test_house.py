"""The house: its walls, its pins, its documents, and the scripts that set it up."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "explorer"
HEAVY = ("torch", "transformers", "deepspeed")
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("**/*.md")])


def imported_by(statement: str) -> set[str]:
    """The top-level packages that a fresh Python has loaded after a statement."""
    code = f"{statement}\nimport sys; print(*sorted({{name.split('.')[0] for name in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def imports_of(path: Path) -> Iterator[str]:
    """Every module a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


# --- walls


@pytest.mark.parametrize("module", ["explorer", "explorer.setup", "explorer.profile", "explorer.dsconfig", "explorer.catalog", "explorer.units", "explorer.advice", "explorer.advice.oom", "explorer.dsconfig.read", "explorer.dsconfig.write"])
def test_the_schema_loads_nothing_heavy(module: str) -> None:
    assert not imported_by(f"import {module}") & {*HEAVY, "numpy", "ipywidgets", "altair", "anywidget"}


@pytest.mark.parametrize("module", ["explorer.estimator.estimate", "explorer.advice.check", "explorer.measure.runner", "explorer.measure.records", "explorer.cli"])
def test_the_core_loads_neither_torch_nor_widgets(module: str) -> None:
    assert not imported_by(f"import {module}") & {*HEAVY, "ipywidgets", "altair", "anywidget"}


def test_the_page_loads_neither_torch_nor_altair() -> None:
    loaded = imported_by("from explorer.ui.dashboard import Explorer")
    assert "ipywidgets" in loaded
    assert not loaded & {*HEAVY, "altair"}


def test_charts_know_no_widgets_and_state_knows_no_view() -> None:
    assert not imported_by("import explorer.ui.charts") & {"ipywidgets", "anywidget"}
    for module in ("state", "consulting", "recordings", "probing", "doctor_html"):
        assert not imported_by(f"import explorer.ui.{module}") & {"ipywidgets", "anywidget", "altair"}, module


def test_estimator_and_measure_never_import_the_page() -> None:
    """Not in functions either: whoever draws asks them, never the other way round."""
    files = [path for part in ("estimator", "measure", "dsconfig", "catalog", "advice") for path in (PACKAGE / part).rglob("*.py")]
    assert len(files) > 20
    breaches = [f"{path.relative_to(ROOT)} imports {name}" for path in files for name in imports_of(path) if name.split(".")[0] in ("ipywidgets", "altair", "anywidget", "voila") or name.startswith("explorer.ui")]
    assert not breaches


def modules() -> dict[str, Path]:
    """Dotted name → file, of the package, the tests and the benchmarks."""
    files = [path for folder in ("explorer", "tests", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
    return {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in files}


def needs(path: Path, known: Mapping[str, Path]) -> set[str]:
    """Our modules that a file imports, anywhere in it; `from package import module` is of the module."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {name if name in known else node.module for name in names}
    return {name for name in found if name in known and known[name] != path}


def circle(graph: Mapping[str, set[str]]) -> list[str]:
    """Modules that import each other in a ring, in order; none where there is no ring."""
    done: set[str] = set()

    def walk(name: str, trail: list[str]) -> list[str]:
        if name in trail:
            return [*trail[trail.index(name) :], name]
        if name not in done:
            for other in sorted(graph[name]):
                if found := walk(other, [*trail, name]):
                    return found
            done.add(name)
        return []

    return next((found for name in sorted(graph) if (found := walk(name, []))), [])


def test_no_two_modules_import_each_other() -> None:
    """Not over third ones either, and not in functions: what two need is in a module of its own."""
    known = modules()
    assert len(known) > 100
    assert circle({name: needs(path, known) for name, path in known.items()}) == []
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"a"}}) == ["a", "b", "c", "a"]


def test_bytes_are_named_as_such() -> None:
    """A field that counts bytes says so: an annotation of int on a name that speaks of GiB or MiB would mix units."""
    wrong = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and re.search(r"_(gib|mib|gb|mb)$", node.target.id) and ast.unparse(node.annotation) == "int":
                wrong.append(f"{path.name}: {node.target.id}")
    assert not wrong


# --- pins


def pins() -> dict[str, str]:
    """Package → pinned version, names in their normal form."""
    lines = [line.split("#")[0].strip() for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()]
    return {normal(name): version for name, version in (line.split("==") for line in lines if line)}


def normal(name: str) -> str:
    """PEP 503."""
    return re.sub(r"[-_.]+", "-", name).lower()


def test_constraints_are_pins_and_nothing_else() -> None:
    text = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    assert not re.search(r"https?:|file:|index-url|find-links|trusted-host|(^|\s)/\w", text, re.MULTILINE)
    assert all(re.fullmatch(r"[\w.]+", version) for version in pins().values())  # no +cpu: that build exists on one index only


def test_every_requirement_is_pinned_within_its_bounds() -> None:
    from packaging.requirements import Requirement

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [Requirement(line) for line in [*project["dependencies"], *(r for extra in project["optional-dependencies"].values() for r in extra)]]
    assert len(wanted) > 12
    assert not [str(r) for r in wanted if normal(r.name) not in pins() or pins()[normal(r.name)] not in r.specifier]


def test_what_shapes_tapes_is_pinned_exactly() -> None:
    assert (pins()["transformers"], pins()["torch"], pins()["deepspeed"]) == ("5.17.0", "2.13.0", "0.19.8")


# --- documents


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: p.name)
def test_links_lead_somewhere(document: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)", document.read_text(encoding="utf-8"))
    missing = [t for t in targets if "://" not in t and not (document.parent / t).exists()]
    assert not missing


def test_the_documents_are_there() -> None:
    assert {p.name for p in DOCUMENTS} >= {"README.md", "CONTRIBUTING.md", "architecture.md", "contract.md"}
    assert "Apache License" in (ROOT / "LICENSE").read_text(encoding="utf-8")


def blocks(document: str, language: str) -> list[str]:
    """The fenced blocks of a document in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / document).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def test_the_readmes_python_gives_what_its_comments_say() -> None:
    names: dict = {}
    checked = 0
    for block in blocks("README.md", "python"):
        exec(block, names)
        for code, says in re.findall(r"^(\S.*?)\s+# ('.*')$", block, re.MULTILINE):
            assert eval(code, names) == ast.literal_eval(says), code
            checked += 1
    assert checked >= 4


@pytest.mark.parametrize("document", ["README.md", "docs/contract.md"])
def test_the_documents_jobs_are_jobs(document: str) -> None:
    import json

    from explorer.setup import Setup

    jobs = [job for job in map(json.loads, blocks(document, "json")) if "model" in job]
    assert jobs
    for job in jobs:
        assert Setup.from_job(job).micro_batch == job["micro_batch"]


def test_the_contract_names_every_key() -> None:
    """Keys of a job, of an answer, categories and exit codes, as the code has them."""
    from dataclasses import fields

    from explorer import profile
    from explorer.setup import Setup

    text = (ROOT / "docs" / "contract.md").read_text(encoding="utf-8")
    answer = {*profile.CATEGORIES, *profile.PHASES}
    for part in (profile.Peak, profile.Host, profile.Failure, profile.Verdict):
        answer |= {f.name for f in fields(part)}
    answer |= {f.name for f in fields(profile.Profile)} - {"timeline", "timeline_phases", "requested_peak"}
    job = {f.name for f in fields(Setup)}
    assert not [name for name in sorted(answer | job) if f"`{name}`" not in text and f'"{name}"' not in text]


def tracked() -> list[Path]:
    """The files of the checkout, as git lists them."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in listed.split("\0") if name and (ROOT / name).is_file()]


def test_no_file_names_one_machine() -> None:
    """Absolute paths of a home or a work folder, and package indexes: they hold on one machine only."""
    files = tracked()
    assert len(files) > 60
    foreign = re.compile(r"/home/\w+/|/work/\w+|/Users/\w+/|extra-index-url|--index-url|/opt/\w+")
    found = []
    for path in files:
        if path.suffix in (".gz", ".png") or path == Path(__file__):
            continue
        found += [f"{path.relative_to(ROOT)}: {m.group()}" for m in foreign.finditer(path.read_text(encoding="utf-8", errors="replace" if path.suffix == ".wasm" else "strict"))]
    assert not found


# --- setting up


def set_up(tmp_path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """tools/setup.sh in a copy of the files that it reads."""
    place = tmp_path / "checkout"
    if not place.exists():
        (place / "tools").mkdir(parents=True)
        for name in ("pyproject.toml", "constraints.txt", "tools/setup.sh", "README.md"):
            shutil.copy(ROOT / name, place / name)
    base = {k: v for k, v in os.environ.items() if k not in ("PYTHON", "VENV", "VENV_FLAGS", "MAKEFLAGS")}
    return subprocess.run(["sh", "tools/setup.sh", "probe"], cwd=place, env={**base, **environment}, capture_output=True, text=True, check=False, timeout=120)


def one_sentence(done: subprocess.CompletedProcess[str]) -> str:
    """The last line of a failure, which is all a person needs."""
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("Cannot set up: ")
    assert "Traceback" not in done.stderr
    return last


def test_a_python_that_is_too_old_is_named(tmp_path: Path) -> None:
    old = tmp_path / "python3.9"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    assert "older than Python 3.11" in one_sentence(set_up(tmp_path, PYTHON=str(old)))


def test_a_folder_that_is_no_venv_is_left_alone(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("precious")
    assert "is not a virtual environment" in one_sentence(set_up(tmp_path, VENV=str(mine), PYTHON=sys.executable))
    assert (mine / "thesis.txt").read_text() == "precious"


def test_a_full_disk_is_said_before_anything_is_fetched(tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "df").write_text("#!/bin/sh\necho Filesystem blocks Used Available\necho disk 100 99 1024\n")
    (tools / "df").chmod(0o755)
    said = one_sentence(set_up(tmp_path, PATH=f"{tools}:{os.environ['PATH']}", PYTHON=sys.executable))
    assert "1 MiB of free disk" in said
    assert not (tmp_path / "checkout" / ".venv").exists()


def test_no_network_is_one_sentence(tmp_path: Path) -> None:
    nothing = tmp_path / "pip.conf"
    nothing.write_text("[global]\nno-index = true\n")
    said = one_sentence(set_up(tmp_path, PYTHON=sys.executable, PIP_CONFIG_FILE=str(nothing), PIP_NO_INDEX="1", PIP_FIND_LINKS=str(tmp_path)))
    assert "is there a network" in said


def test_nothing_is_done_where_nothing_changed(tmp_path: Path) -> None:
    """The stamp is what the script itself would write; then it says nothing, and asks no pip."""
    place = tmp_path / "checkout"
    set_up(tmp_path, PYTHON="/nowhere/python")
    venv = place / ".venv"
    (venv / "bin").mkdir(parents=True)
    script = (place / "tools" / "setup.sh").read_text()
    line = next(text for text in script.splitlines() if text.startswith("fingerprint()"))
    stamp = subprocess.run(["sh", "-c", f"{line}\nfingerprint"], cwd=place, capture_output=True, text=True, check=True).stdout
    (venv / ".set-up-probe").write_text(stamp)
    done = set_up(tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    with (place / "constraints.txt").open("a") as file:
        file.write("# changed\n")
    assert set_up(tmp_path, PYTHON="/nowhere/python").returncode != 0


@pytest.mark.parametrize("script", [".ci/run", "binder/postBuild", "tools/setup.sh"])
def test_scripts_parse(script: str) -> None:
    shell = "sh" if script.endswith(".sh") else "bash"
    assert subprocess.run([shell, "-n", str(ROOT / script)], check=False).returncode == 0
    assert shell == "sh" or os.access(ROOT / script, os.X_OK)


def test_make_says_what_it_can_do() -> None:
    said = subprocess.run(["make", "-s"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "make dashboard" in said and "make test" in said


# --- Binder


def test_binder_needs_no_torch() -> None:
    lines = [line.split("#")[0].strip() for line in (ROOT / "binder" / "requirements.txt").read_text(encoding="utf-8").splitlines()]
    assert [line for line in lines if line] == ["-c ../constraints.txt", "-e ."]
    assert re.fullmatch(r"python-3\.1[1-4]", (ROOT / "binder" / "runtime.txt").read_text(encoding="utf-8").strip())


def test_repo2docker_copies_the_source_before_it_installs() -> None:
    tool = shutil.which("repo2docker", path=os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]]))
    if tool is None:
        pytest.skip("repo2docker is not installed (pip install jupyter-repo2docker)")
    done = subprocess.run([tool, "--no-build", "--debug", str(ROOT)], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    dockerfile = done.stdout + done.stderr
    assert 0 <= dockerfile.index("COPY --chown") < dockerfile.index('-r "binder/requirements.txt"') < dockerfile.index("./binder/postBuild")


def test_the_lesson_runs_where_binder_installed_it(tmp_path: Path) -> None:
    """An empty environment made from binder/'s own files: no torch there, and the lesson runs to its end."""
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "env")], check=True)
    python = str(tmp_path / "env" / "bin" / "python")
    home = {"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache"), "XDG_DATA_HOME": str(tmp_path / "data")}
    base = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV", "EXPLORER_DATA", "JUPYTER_PATH")}
    env = {**base, **home, "PATH": f"{tmp_path / 'env' / 'bin'}:{os.environ['PATH']}"}
    installed = subprocess.run([python, "-m", "pip", "install", "-q", "--disable-pip-version-check", "-r", "binder/requirements.txt"], cwd=ROOT, env={**env, **_pip_settings()}, capture_output=True, text=True, check=False)
    if re.search(r"connection|resolution|unreachable|timed out", installed.stderr, re.IGNORECASE) and installed.returncode:
        pytest.skip("pip cannot reach a package index")
    assert installed.returncode == 0, installed.stderr
    assert subprocess.run([python, "-c", "import torch"], env=env, capture_output=True, check=False).returncode != 0
    built = subprocess.run(["bash", "binder/postBuild"], cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    assert list((tmp_path / "cache").rglob("*.js")), "postBuild left no bundle in the cache"
    code = (
        "import nbformat; from nbclient import NotebookClient\n"
        "notebook = nbformat.read('notebooks/clip-out-of-memory.ipynb', 4)\n"
        "NotebookClient(notebook, timeout=180, kernel_name='python3', resources={'metadata': {'path': 'notebooks'}}).execute()\n"
    )
    ran = subprocess.run([python, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]


def _pip_settings() -> dict[str, str]:
    """A user's pip settings live under HOME, which the environment above replaces."""
    own = Path.home() / ".config" / "pip" / "pip.conf"
    return {"PIP_CONFIG_FILE": str(own)} if own.exists() and "PIP_CONFIG_FILE" not in os.environ else {}
