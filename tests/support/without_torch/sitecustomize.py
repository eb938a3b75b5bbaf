"""Python as where polydraft was installed without its extras: on PYTHONPATH, this file hides their packages from a process and from all that it starts."""

import sys
from importlib.machinery import PathFinder

HIDDEN = frozenset({"accelerate", "gguf", "scipy", "sklearn", "torch", "transformers", "xllamacpp"})


class _Finder:
    """Finds what PathFinder finds, but for what is hidden."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        return None if name.partition(".")[0] in HIDDEN else PathFinder.find_spec(name, path, target)

    @staticmethod
    def find_distributions(*arguments, **others):
        found = PathFinder.find_distributions(*arguments, **others)
        return (distribution for distribution in found if distribution.name.lower() not in HIDDEN)


sys.meta_path[sys.meta_path.index(PathFinder)] = _Finder
