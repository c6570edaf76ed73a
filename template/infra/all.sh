#!/usr/bin/env bash
# Every step in order. Each can also be run alone, and all of them can be run again.
source "$(dirname "$0")/lib.sh"
refuse_placeholders project_id bucket

for step in apis roles quota accounts registry bucket cluster node-pools access credentials; do
  note ""
  note "== $step"
  "$ROOT/infra/$step.sh"
done
