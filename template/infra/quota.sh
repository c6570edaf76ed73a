#!/usr/bin/env bash
# Does the project's quota hold the chips of this run? Without it every later step succeeds and the hosts never come.
# Quota is not capacity: a zone can be sold out all the same. CHECK_QUOTA=no goes on in spite of what this step finds.
source "$(dirname "$0")/lib.sh"
refuse_placeholders project_id

chips=$((CHIPS_PER_SLICE * NUM_SLICES))
console="https://console.cloud.google.com/iam-admin/quotas?project=$PROJECT_ID"

if [[ $CAPACITY == reservation ]]; then
  note "no quota to check: the chips of a reservation were counted when it was made"
  exit 0
fi
note "needed in $REGION: room for $chips chips in ${QUOTAS//,/ or in }"
filter=""
for quota in ${QUOTAS//,/ }; do
  if [[ $quota == unknown ]]; then
    note "  (unknown: its id in gcloud is not documented; see 'Preemptible TPU slices $GENERATION' at $console)"
  else
    filter="$filter${filter:+ OR }quotaId~^${quota%:*}\$"
  fi
done
if [[ -z $filter ]]; then exit 0; fi

# One line a value: id, region, family, chips. An absent number is a zero.
question=(
  gcloud beta quotas info list --service=compute.googleapis.com "$PROJECT_FLAG"
  --filter="$filter" --flatten="dimensionsInfos[]"
  --format="csv[no-heading](quotaId,dimensionsInfos.dimensions.region,dimensionsInfos.dimensions.tpu_family,dimensionsInfos.details.value)"
)
if planning; then
  note "  $(in_full "${question[@]}")"
  exit 0
fi
if ! values=$("${question[@]}"); then
  note "quota: not checked, because that question failed (it needs gcloud's beta commands and role" \
    "roles/cloudquotas.viewer). See $console"
  exit 0
fi

# allowed QUOTA: how many chips, -1 for no limit, or nothing where Google Cloud states no value for this very region and
# family. Such a default is no proof of a zero: projects with it do get TPUs.
allowed() {
  awk -F, -v id="${1%:*}" -v region="$REGION" -v family="$(if [[ $1 == *:* ]]; then printf '%s' "${1#*:}"; fi)" '
    $1 == id && $2 == region && (family == "" || tolower($3) == tolower(family)) { found = 1; value = $4 + 0 }
    END { if (found) print value }' <<<"$values"
}

too_small="" open_question=no
for quota in ${QUOTAS//,/ }; do
  limit=""
  if [[ $quota != unknown ]]; then limit=$(allowed "$quota"); fi
  if [[ -z $limit ]]; then
    open_question=yes
  elif ((limit < 0 || limit >= chips)); then
    if ((limit < 0)); then limit="any number of"; fi
    note "there: $quota allows $limit chips in $REGION (what the project already runs counts too)"
    exit 0
  else
    too_small="$too_small${too_small:+, }$quota allows $limit"
  fi
done
if [[ $open_question == yes ]]; then
  note "quota: ${too_small:+$too_small; }no value for $REGION could be read for the rest. See $console"
elif [[ ${CHECK_QUOTA:-yes} == no ]]; then
  note "quota: not enough ($too_small), and CHECK_QUOTA=no: going on"
else
  die "$NUM_SLICES x $GENERATION $TOPOLOGY with capacity $CAPACITY needs $chips chips in $REGION, and $too_small." \
    "Ask for more at $console, take a smaller topology or another zone" \
    "(make reconfigure ARGS=topology=...), or go on in spite of it with CHECK_QUOTA=no."
fi
