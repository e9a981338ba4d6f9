"""`python -m minidl` prints the commands; `python -m minidl --completion bash` a shell's code to complete them."""

import sys

from minidl.errors import MinidlError, report

COMMANDS = {
    "train": "train a network on this machine, or as a rank of an MPI job",
    "simulate": "train on a simulated cluster, with a virtual clock",
    "launch": "run a script of your own as several processes that train one model",
    "topology": "print and draw which replicas exchange with which others",
    "report": "write the page of a run, or compare several runs",
    "learn": "do the exercises of the lessons, and have them graded",
    "info": "print what this machine has, and what minidl uses of it",
}


def main(argv: list[str]) -> int:
    """Print the commands. Returns the exit code: 0, or 2 if the arguments are wrong."""
    if argv[:1] == ["--completion"]:
        return _completion(argv[1:])
    if argv and argv[0] in COMMANDS:
        return report(f"{argv[0]} is a module: run python -m minidl.{argv[0]}")
    if argv and argv[0] not in ("-h", "--help"):
        return report(f"unknown command {argv[0]!r}: expected python -m minidl.NAME, with one of {', '.join(COMMANDS)}")
    for name, purpose in COMMANDS.items():
        print(f"python -m minidl.{name:<9} {purpose}")
    print("\nEach command prints its options with --help. python -m minidl --completion bash (or zsh, tcsh) prints\n"
          "what a shell needs to complete those of minidl-train, minidl-simulate and minidl-launch.")  # fmt: skip
    return 0


def _completion(words: list[str]) -> int:
    from minidl import launch, simulate
    from minidl.cli.completion import script
    from minidl.run.config import Config

    commands = {"minidl-train": Config, "minidl-simulate": simulate.Options, "minidl-launch": launch.Options}
    try:
        print(script(" ".join(words), commands))
    except MinidlError as error:
        return report(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
