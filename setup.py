"""The part of the build that pyproject.toml cannot express: `kernels/` and `comm/` are packages of `minidl`.

In a checkout they are at the top level, and `minidl/kernels` and `minidl/comm` are links to them (or small text files,
if git was configured not to create links). In a wheel and in an sdist they are ordinary folders of `minidl`.
"""

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


skipped = [pattern for name in AT_THE_TOP for pattern in (f"minidl.{name}", f"minidl.{name}.*")]
packages = find_namespace_packages(include=["minidl", "minidl.*"], exclude=["*__pycache__*", *skipped])
for name in AT_THE_TOP:
    inside = find_namespace_packages(name, exclude=["*__pycache__*"])
    packages += [f"minidl.{name}", *(f"minidl.{name}.{package}" for package in inside)]

setup(
    packages=packages,
    package_dir={f"minidl.{name}": name for name in AT_THE_TOP},
    cmdclass={"sdist": Sdist},
)
