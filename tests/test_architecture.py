"""One direction of imports: script -> layers -> ops -> formats or kernels; the oracle and the package never meet."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# folder or file: what its modules may import of this project
MAY_IMPORT = {
    "reference": {"reference"},
    "encoding": {"encoding"},
    "dsv4/ops": {"dsv4.ops", "dsv4.formats", "dsv4.errors", "dsv4.kernels"},
    "dsv4/kernels": {"dsv4.kernels", "dsv4.errors", "dsv4.formats"},
    "dsv4/layers": {"dsv4.layers", "dsv4.ops", "dsv4.cache", "dsv4.checkpoint", "dsv4.config", "dsv4.errors", "dsv4.formats"},
    "dsv4/formats.py": set(),
    "dsv4/config.py": {"dsv4.errors"},
    "dsv4/cache.py": {"dsv4.config", "dsv4.ops"},
    "dsv4/shards.py": {"dsv4.errors"},
    "dsv4/checkpoint.py": {"dsv4.config", "dsv4.errors", "dsv4.formats", "dsv4.shards"},
    "dsv4": {"dsv4"},
    "single_shot_inference.py": {"dsv4", "encoding"},
}
OURS = {"dsv4", "encoding", "reference", "helpers", "tests", "single_shot_inference"}


def imports(path: Path) -> set[str]:
    """Dotted names of this project's modules that a file imports, at any depth of its code."""
    package = path.relative_to(ROOT).parent.parts
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join((*above, *([node.module] if node.module else [])))
            found |= {f"{base}.{alias.name}" for alias in node.names}
    return {name for name in found if name.split(".")[0] in OURS}


def files(place: str) -> list[Path]:
    return [ROOT / place] if place.endswith(".py") else sorted((ROOT / place).rglob("*.py"))


@pytest.mark.parametrize("place", MAY_IMPORT)
def test_imports_go_one_way(place):
    paths = files(place)
    assert paths
    for path in paths:
        stray = {name for name in imports(path) if not any(f"{name}.".startswith(f"{allowed}.") for allowed in MAY_IMPORT[place])}
        assert not stray, f"{path.relative_to(ROOT)} imports {sorted(stray)}"


def test_the_script_stays_short():
    """The issue's bound: it is read from top to bottom."""
    assert len((ROOT / "single_shot_inference.py").read_text().splitlines()) < 600
