"""The package list in setup.cfg is written by hand, and must name every folder that holds code."""

import configparser
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]


def packages_under(folder: Path, name: str) -> set[str]:
    return {
        ".".join((name, *init.parent.relative_to(folder).parts))
        for init in folder.rglob("__init__.py")
    }


def test_setup_cfg_names_every_package():
    options = configparser.ConfigParser()
    options.read(CHECKOUT / "setup.cfg")
    listed = set(options["options"]["packages"].split())
    found = packages_under(CHECKOUT / "kdist", "kdist")
    found |= packages_under(CHECKOUT / "layers", "kdist.layers")
    found |= packages_under(CHECKOUT / "callbacks", "kdist.callbacks")
    assert listed == found


def test_every_folder_with_modules_is_a_package():
    for top in ("kdist", "layers", "callbacks"):
        for module in (CHECKOUT / top).rglob("*.py"):
            assert (module.parent / "__init__.py").is_file(), f"{module.parent} has no __init__.py"
