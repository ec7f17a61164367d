"""Write the gRPC stubs from proto/, or tell whether the committed ones are stale.

python tools/check_protos.py            exit 1 and name the files that differ
python tools/check_protos.py --write    regenerate outrider/v1 in place
"""

import argparse
import sys
import tempfile
from importlib.resources import files
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = Path("outrider") / "v1"


def generate(destination: Path) -> None:
    """Compile every proto of the package into `destination`.

    Raises:
        SystemExit: when protoc refuses; it has printed why.
    """
    protos = sorted((ROOT / "proto" / PACKAGE).glob("*.proto"))
    outputs = [f"--{kind}_out={destination}" for kind in ("python", "grpc_python", "pyi")]
    well_known = files("grpc_tools") / "_proto"
    arguments = ["protoc", f"-I{ROOT / 'proto'}", f"-I{well_known}", *outputs, *(str(proto) for proto in protos)]
    if protoc.main(arguments) != 0:
        raise SystemExit("protoc failed")


def stubs(root: Path) -> dict[str, bytes]:
    """Generated files under `root`, by name."""
    return {path.name: path.read_bytes() for path in sorted((root / PACKAGE).glob("*_pb2*.py*"))}


def main() -> int:
    """Entry point; the exit status is 0 when the stubs are fresh or have been written."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="regenerate the stubs in place")
    if parser.parse_args().write:
        generate(ROOT)
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        generate(Path(scratch))
        fresh = stubs(Path(scratch))
    committed = stubs(ROOT)
    stale = sorted(name for name in fresh.keys() | committed.keys() if fresh.get(name) != committed.get(name))
    if stale:
        print(f"stale stubs in {PACKAGE}: {', '.join(stale)}; run `make proto` and commit the result", file=sys.stderr)
        return 1
    print(f"{len(fresh)} stubs are fresh")
    return 0


if __name__ == "__main__":
    sys.exit(main())
