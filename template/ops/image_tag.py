"""The image's tag: a hash over the Dockerfile and exactly the files that may enter the image.

Equal content gives an equal tag on every machine and at every commit, so a tag that exists never has to be built again
and never changes its meaning. Standard library only: `make image` may run before the packages are installed.
"""

import argparse
import hashlib
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TAG_LENGTH = 16  # hexadecimal digits: 64 bits, far beyond an accidental collision in one registry


def image_files(root: Path) -> list[Path]:
    """Return the Dockerfile and every file that .dockerignore lets into the image, sorted, relative to `root`.

    Raises FileNotFoundError when a file that .dockerignore names is absent, since the image could not be built either.
    """
    files = {Path("Dockerfile")}
    for line in (root / ".dockerignore").read_text().splitlines():
        if not line.startswith("!"):
            continue
        pattern = line.removeprefix("!").strip()
        # In docker's dialect ** matches files at any depth, in pathlib's only folders.
        matches = list(root.glob(f"{pattern}/*" if pattern.endswith("/**") else pattern))
        if not matches:
            raise FileNotFoundError(pattern)
        files.update(match.relative_to(root) for match in matches if match.is_file())
    return sorted(files)


def image_tag(root: Path) -> str:
    """Return the tag, `TAG_LENGTH` hexadecimal digits, of the image that would be built from `root` now."""
    digest = hashlib.sha256()
    for path in image_files(root):
        content = (root / path).read_bytes()
        # Name and length stand before each content, so that moving bytes from one file to another changes the hash.
        digest.update(f"{path.as_posix()}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()[:TAG_LENGTH]


def main() -> int:
    """Print the tag, or with --files what it is computed from."""
    parser = argparse.ArgumentParser(prog="python -m ops.image_tag", description=main.__doc__)
    parser.add_argument("--files", action="store_true", help="print the files that enter the image, one a line")
    try:
        if parser.parse_args().files:
            print(*(path.as_posix() for path in image_files(ROOT)), sep="\n")
        else:
            print(image_tag(ROOT))
    except FileNotFoundError as error:
        name = error.filename or error.args[0]
        print(f"error: {name} is missing, but it belongs into the image (see .dockerignore).", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
