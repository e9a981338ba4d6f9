"""The parts of the build that pyproject.toml cannot express.

- `kernels/` and `comm/` are packages of `minidl`. In a checkout they are at the top level, and `minidl/kernels` and
  `minidl/comm` are links to them (or small text files, if git was configured not to create links). In a wheel and in an
  sdist they are ordinary folders of `minidl`.
- The readme of a package is README.md without relative links, which lead nowhere on a package index.
"""

import re
import shutil
from pathlib import Path

from setuptools import find_namespace_packages, setup
from setuptools.command.sdist import sdist

# Empty in an unpacked sdist, in which the folders are already below minidl/.
AT_THE_TOP = [name for name in ("kernels", "comm") if Path(name).is_dir()]


class Sdist(sdist):
    def make_release_tree(self, base_dir, files):
        super().make_release_tree(base_dir, files)
        for name in AT_THE_TOP:
            shutil.move(Path(base_dir, name), Path(base_dir, "minidl", name))


def readme():
    """Return README.md without its relative links: their text stays, and pictures are left out."""
    text, relative = Path("README.md").read_text(encoding="utf-8"), r"\]\((?!https?://)[^)\s]+\)"
    without_pictures = re.sub(rf"!\[[^]\n]*{relative}\n*", "", text)
    return re.sub(rf"\[([^]\n]*){relative}", r"\1", without_pictures)


skipped = [pattern for name in AT_THE_TOP for pattern in (f"minidl.{name}", f"minidl.{name}.*")]
packages = find_namespace_packages(include=["minidl", "minidl.*"], exclude=["*__pycache__*", *skipped])
for name in AT_THE_TOP:
    inside = find_namespace_packages(name, exclude=["*__pycache__*"])
    packages += [f"minidl.{name}", *(f"minidl.{name}.{package}" for package in inside)]

setup(
    long_description=readme(),
    long_description_content_type="text/markdown",
    packages=packages,
    package_dir={f"minidl.{name}": name for name in AT_THE_TOP},
    cmdclass={"sdist": Sdist},
)
