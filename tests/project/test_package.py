"""The sdist and the wheel: built, installed without a compiler at hand, and used."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from checkpoints import byte_tokenizer
from skipdecode.engine.kernels.native import NativeKernels
from skipdecode.engine.kernels.targets import LIBRARY_SUFFIX, TARGETS, find_compiler
from tiny import tiny_model

ROOT = Path(__file__).resolve().parents[2]
MB = 2**20
SDIST = "import sys; from setuptools import build_meta; print(build_meta.build_sdist(sys.argv[1]))"
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_compiler() is None or not TARGETS, reason="needs a compiler, and a processor it knows"),
]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of the sdist of this tree."""
    folder = tmp_path_factory.mktemp("package")
    tree = folder / "tree"
    shutil.copytree(ROOT / "src", tree / "src", ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    subprocess.run([sys.executable, "-c", SDIST, str(folder)], cwd=tree, check=True, stdout=subprocess.DEVNULL)
    (sdist,) = folder.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (source,) = (folder / "unpacked").iterdir()
    command = [*PIP, "wheel", "--no-build-isolation", "--no-deps", "--wheel-dir", str(folder), str(source)]
    subprocess.run(command, check=True)
    (made,) = folder.glob("*.whl")
    return made


def test_the_wheel_has_kernels_and_fits_every_python(wheel: Path):
    assert wheel.name.endswith(f"-py3-none-linux_{platform.machine()}.whl")
    assert wheel.stat().st_size < 30 * MB


def test_the_installed_wheel_decodes_without_a_compiler(wheel: Path, tmp_path: Path):
    installed, model, cache = tmp_path / "installed", tmp_path / "model", tmp_path / "cache"
    subprocess.run([*PIP, "install", "--no-deps", "--target", str(installed), str(wheel)], check=True)
    libraries = {path.name for path in (installed / "skipdecode" / "engine" / "kernels").glob(f"*{LIBRARY_SUFFIX}")}
    assert libraries == {f"kernels-{name}{LIBRARY_SUFFIX}" for name in TARGETS}
    tokenizer = byte_tokenizer()
    tiny_model("llama", vocab_size=len(tokenizer)).save_pretrained(model)
    tokenizer.save_pretrained(model)
    kept = {name: os.environ[name] for name in ("HOME", "LD_LIBRARY_PATH") if name in os.environ}
    variables = kept | {"PATH": str(tmp_path), "PYTHONPATH": str(installed), "SKIPDECODE_CACHE": str(cache)}
    command = ["-m", "skipdecode", "generate", str(model), "--engine", "fast", "--max-new-tokens", "4", "one"]
    where = "import skipdecode; print(skipdecode.__file__)"
    can = "from skipdecode.engine.kernels.native import NativeKernels as N; k = N()"
    can += "; print((k.multiplies_bytes, k.finds_likeliest, k.instructions))"
    here = NativeKernels()  # compiled for this very processor
    able = str((here.multiplies_bytes, here.finds_likeliest, here.instructions))
    for arguments, expected in ((["-c", where], str(installed)), (["-c", can], able), (command, "")):
        done = subprocess.run([sys.executable, *arguments], env=variables, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith(expected)
    assert not list(cache.glob("*.so"))
