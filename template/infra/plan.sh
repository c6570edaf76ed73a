#!/usr/bin/env bash
# Print what `make infra image` would make, every command in full, and what it would cost an hour. Asks nothing, changes
# nothing, and needs neither gcloud nor a login. STEP_SECONDS=1.1 adds the cost of the configured number of steps.
export PLAN=yes
source "$(dirname "$0")/lib.sh"

"$ROOT/infra/all.sh"
note ""
note "== image"
"$ROOT/infra/image.sh"

chips=$((CHIPS_PER_SLICE * NUM_SLICES))
note ""
note "== cost"
note "$chips chips ($NUM_SLICES x $GENERATION $TOPOLOGY, $CAPACITY), for as long as their hosts exist"
if [[ -z $PRICE_PER_CHIP_HOUR ]]; then
  note "no price is known for $GENERATION with capacity $CAPACITY: see cloud.google.com/tpu/pricing"
  exit 0
fi
awk -v price="$PRICE_PER_CHIP_HOUR" -v chips="$chips" -v date="$PRICE_DATE" -v steps="$STEPS" -v seconds="${STEP_SECONDS:-}" '
  BEGIN {
    hour = price * chips
    printf "# about %.2f USD an hour: %d chips at %.2f USD, a list price seen in %s and only indicative\n", hour, chips, price, date
    print "# not included: the CPU node, the disks, the bucket, and the cluster fee"
    if (seconds != "")
      printf "# %d steps of %s s: %.1f hours, about %.2f USD\n", steps, seconds, steps * seconds / 3600, hour * steps * seconds / 3600
    else
      printf "# %d steps: add STEP_SECONDS=<seconds a step> to see what they cost\n", steps
  }'
