"""Evaluate --filter expressions with gcloud's own engine, offline. Run with gcloud's own Python, not with ours.

Argument: the SDK's folder. Standard input: a JSON list [expression, resource] a line. Standard output: "true" or
"false" for each. gcloud warns on standard error where a future version will decide otherwise.
"""

import json
import sys
from pathlib import Path

root = Path(sys.argv[1])
sys.path[:0] = [str(root / "lib"), str(root / "lib" / "third_party")]

from googlecloudsdk.core.resource import resource_filter  # noqa: E402

for line in sys.stdin:
    expression, resource = json.loads(line)
    print(json.dumps(bool(resource_filter.Compile(expression).Evaluate(resource))))
