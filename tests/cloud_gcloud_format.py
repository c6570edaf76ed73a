"""Print resources as gcloud would with --flatten and --format, offline. Run with gcloud's own Python, not with ours.

Arguments: the SDK's folder, the key to flatten without its brackets, the format. Standard input: a JSON list.
"""

import json
import sys
from pathlib import Path

root, key, form = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
sys.path[:0] = [str(root / "lib"), str(root / "lib" / "third_party")]

from googlecloudsdk.calliope import display_taps  # noqa: E402
from googlecloudsdk.core.resource import resource_printer  # noqa: E402
from googlecloudsdk.core.util import peek_iterable  # noqa: E402

resource_printer.Print(peek_iterable.Tapper(json.load(sys.stdin), display_taps.Flattener(key.split("."))), form)
