"""Parse command lines with gcloud's own parser, offline. Run with gcloud's own Python, not with ours.

Argument: the SDK's folder. Standard input: one command line a line. Standard output: for each a JSON object with
either the parsed "arguments" or an "error". gcloud's linter does not see that a repeated flag replaces the first; its
parser shows what remains.
"""

import contextlib
import io
import json
import shlex
import sys
from pathlib import Path

root = Path(sys.argv[1])
sys.path[:0] = [str(root / "lib"), str(root / "lib" / "third_party")]

from googlecloudsdk import gcloud_main  # noqa: E402

parser = gcloud_main.CreateCLI([])._CLI__parser
for line in sys.stdin:
    words = shlex.split(line)[1:]
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            parsed = parser.parse_args(words)
        print(json.dumps({"arguments": {k: str(v) for k, v in parsed.GetSpecifiedArgs().items()}}))
    except SystemExit:
        print(json.dumps({"error": complaint.getvalue().strip() or "refused"}))
