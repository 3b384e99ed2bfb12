"""The manifest of hooks: complete, true of the installed vLLM, and a guard that refuses the rest."""

import importlib
import inspect
import pkgutil

import pytest

pytest.importorskip("vllm")

from prefixshield import serving
from prefixshield.errors import IncompatibleEngineError
from prefixshield.serving import hooks

pytestmark = pytest.mark.engine


def overrides():
    """Every method of ours that has the name of one that vLLM defines in a base class."""
    for info in pkgutil.iter_modules(serving.__path__):
        module = importlib.import_module(f"{serving.__name__}.{info.name}")
        for owner in vars(module).values():
            if not inspect.isclass(owner) or owner.__module__ != module.__name__:
                continue
            bases = [base for base in owner.__mro__ if base.__module__.startswith("vllm.")]
            for name in vars(owner):
                definer = next(
                    (base for base in bases if inspect.isfunction(vars(base).get(name))), None
                )
                if definer is not None:
                    yield f"{definer.__module__}:{definer.__qualname__}.{name}"


def test_every_override_is_in_the_manifest():
    found = set(overrides())
    assert {f"{hooks._POOL}.touch", f"{hooks._SCHEDULER}.__init__"} <= found, "it finds them at all"
    assert found <= {hook.target for hook in hooks.HOOKS}


def test_the_installed_vllm_fits():
    assert hooks.verify() == hooks.installed_vllm()[1]


@pytest.mark.parametrize(
    ("text", "instead", "message"),
    [
        (
            "def touch(self, blocks:",
            "def touch(self, why, blocks:",
            r"BlockPool\.touch takes \(why, blocks\), expected \(blocks\)",
        ),
        ("def touch(", "def hold(", r"BlockPool\.touch is not there, expected \(blocks\)"),
        ("class BlockPool:", "class Pool:", "BlockPool is not there"),
        ("self.num_gpu_blocks", "self.size", "BlockPool has no num_gpu_blocks"),
    ],
)
def test_a_changed_vllm_is_refused(monkeypatch, text, instead, message):
    original = hooks._read_installed

    def changed(path):
        found = original(path)
        return found.replace(text, instead) if path == "vllm/v1/core/block_pool.py" else found

    assert text in original("vllm/v1/core/block_pool.py")
    monkeypatch.setattr(hooks, "_read_installed", changed)
    with pytest.raises(IncompatibleEngineError, match=message):
        hooks.verify()


def test_an_unknown_release_is_refused(monkeypatch):
    monkeypatch.setattr(hooks, "installed_vllm", lambda: ("vllm", "0.99.0+cu130"))
    expected = r"vllm 0\.99\.0\+cu130 is installed, expected one of .*: .*0\.32\.0"
    with pytest.raises(IncompatibleEngineError, match=expected):
        hooks.verify()


def test_a_hook_knows_its_parameters_in_every_release():
    hook = hooks.Hook("m:f", "a b c", "", "", {"0.9.2": None, "0.28.0": "a", "0.30.1": "a b"})
    in_release = {
        release: hook.parameters_in(release)
        for release in ("0.9.0", "0.9.2", "0.10.2", "0.28.0", "0.29.0", "0.30.1", "0.31.0")
    }
    assert in_release == {
        "0.9.0": None,
        "0.9.2": None,
        "0.10.2": ["a"],
        "0.28.0": ["a"],
        "0.29.0": ["a", "b"],
        "0.30.1": ["a", "b"],
        "0.31.0": ["a", "b", "c"],
    }
