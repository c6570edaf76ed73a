# Shared by the scripts in this folder; sourced, never run.
# shellcheck shell=bash
#
# Every script is safe to run again: it asks Google Cloud what is there and makes only what is missing. PLAN=yes asks
# nothing, changes nothing, and prints every command in full. CHECK=yes asks, changes nothing, and prints one line for
# each thing: "there: ..." or "missing: ..."; make doctor reads them.

set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=/dev/null
source "$ROOT/run.env"

PLAN=${PLAN:-no}
CHECK=${CHECK:-no}
PROJECT_FLAG="--project=$PROJECT_ID"

# The label by which destroy.sh knows what these scripts made.
# shellcheck disable=SC2034  # used by the scripts that source this file
OWNER_LABEL="created-by=copier-maxtext-ray"

die() {
  printf 'error: %s\n' "$@" >&2
  exit 1
}

note() {
  if [[ $PLAN == yes ]]; then printf '# %s\n' "$*"; else printf '%s\n' "$*"; fi
}

planning() { [[ $PLAN == yes ]]; }

checking() { [[ $CHECK == yes ]]; }

# lacking WHAT: say that it is not there, and unless this only checks, that it is made now.
lacking() { if checking; then note "missing: $*"; else note "make: $*"; fi; }

# refuse_placeholders ANSWER...: stop, naming each of the answers that is still the questionnaire's placeholder.
refuse_placeholders() {
  local answer missing=""
  for answer in "$@"; do
    if [[ ",$UNANSWERED," == *",$answer,"* ]]; then missing="$missing $answer"; fi
  done
  if [[ -z $missing ]]; then return; fi
  if planning; then
    note "still a placeholder:$missing (the real steps refuse to start until they are given)"
    return
  fi
  local words=""
  for answer in $missing; do words="$words${words:+ }$answer=..."; done
  die "still a placeholder:$missing" "give them with: make reconfigure ARGS=\"$words\""
}

# A command line as one can paste it: words with other than plain characters stand in double quotes, so that a
# $PROJECT_NUMBER printed by a plan still expands.
in_full() {
  local word line=""
  for word in "$@"; do
    if [[ $word =~ ^[A-Za-z0-9_./:@,=+%~-]+$ ]]; then line="$line $word"; else line="$line \"$word\""; fi
  done
  printf '%s\n' "${line# }"
}

# run COMMAND...: print the command in full and run it; a plan only prints it, a check does neither.
run() {
  if checking; then return; fi
  in_full "$@"
  if planning; then return; fi
  "$@" || die "that command failed, and what it says stands above." \
    "What is done stays done: run the same make target again and it continues here."
}

# ask COMMAND...: print what a read-only command answers. A failing question (no login, no permission, no network) stops
# the script, because an empty answer means that something does not exist.
ask() {
  local answer
  answer=$("$@") || die "could not ask Google Cloud: $(in_full "$@")" "log in with: gcloud auth login"
  printf '%s' "$answer"
}

# The filters in these questions are anchored patterns: what gcloud's = matches is announced to change.
#
# absent WHAT COMMAND...: true when the question COMMAND has an empty answer, and always true in a plan.
absent() {
  local what=$1 answer
  shift
  if planning; then
    note "$what"
    return 0
  fi
  answer=$(ask "$@") || exit 1
  if [[ -z $answer ]]; then
    lacking "$what"
    return 0
  fi
  note "there: $what"
  return 1
}

# account_id SUFFIX: the id of the cluster's service account for SUFFIX. Google Cloud takes 6 to 30 characters; a longer
# cluster name is cut, and a checksum keeps two long names apart.
account_id() {
  local name=$CLUSTER_NAME
  if ((${#name} > 22)); then
    name="${name:0:16}$(printf '%s' "$name" | cksum | cut -d' ' -f1 | tail -c 6)"
  fi
  printf '%s-%s' "$name" "$1"
}

account_email() {
  local project=$PROJECT_ID
  # A project of a domain is written domain:project, and its accounts end in project.domain.
  if [[ $project == *:* ]]; then project="${project#*:}.${project%%:*}"; fi
  printf '%s@%s.iam.gserviceaccount.com' "$(account_id "$1")" "$project"
}

# project_number: of the project, asked for once; a plan leaves it to the shell that pastes the line.
project_number() {
  # shellcheck disable=SC2016  # a plan prints the variable's name
  if planning; then printf '%s' '$PROJECT_NUMBER'; else
    ask gcloud projects describe "$PROJECT_ID" --format="value(projectNumber)"
  fi
}

# pods_principal: the pods of the run, as a member of Google Cloud's policies.
pods_principal() {
  local number
  number=$(project_number) || exit 1
  printf '%s/%s' "principal://iam.googleapis.com/projects/$number/locations/global/workloadIdentityPools" \
    "$PROJECT_ID.svc.id.goog/subject/ns/$NAMESPACE/sa/$SERVICE_ACCOUNT"
}

# plan_project_number: in a plan, the line that gives the $PROJECT_NUMBER of later lines its value.
plan_project_number() {
  # shellcheck disable=SC2016  # the line is printed to be pasted
  if planning; then
    printf 'PROJECT_NUMBER=$(gcloud projects describe %s --format="value(projectNumber)")\n' "$PROJECT_ID"
  fi
}

# objectUser reads and writes objects. legacyBucketReader adds storage.buckets.get, which pyarrow asks for whenever Ray
# Train or a data loader opens a gs:// path.
# shellcheck disable=SC2034
BUCKET_ROLES=(roles/storage.objectUser roles/storage.legacyBucketReader)

# granted_on_bucket ROLE MEMBER: a question for `absent`. gcloud has no filter for a bucket's policy.
granted_on_bucket() {
  local policy
  policy=$(gcloud storage buckets get-iam-policy "gs://$BUCKET" "$PROJECT_FLAG" --flatten="bindings[].members" \
    --format="csv[no-heading](bindings.role,bindings.members)") || return 1
  grep -xF "$1,$2" <<<"$policy" || true
}

# pool_name SLICE: the node pool of one slice, counted from 0. Capacity is part of the name: a new answer makes a new pool
# instead of silently keeping the old one.
pool_name() { printf '%s-%s-%s-%s' "$GENERATION" "$TOPOLOGY" "$CAPACITY" "$1"; }

# workload_policy: the name of the policy by which Compute Engine places a slice of this topology.
workload_policy() { printf '%s-%s' "$GENERATION" "$TOPOLOGY"; }

# Slices of the newest generations are placed by a workload policy, all others by --tpu-topology.
needs_workload_policy() { [[ $WORKLOAD_POLICY == yes ]]; }

# wait_for_operation TYPE NAME: wait for a running GKE operation on NAME that an earlier, interrupted run started.
# gcloud shows its progress and gives up by itself after an hour.
wait_for_operation() {
  local operation
  operation=$(ask gcloud container operations list "$PROJECT_FLAG" --location="$CLUSTER_LOCATION" \
    --filter="operationType~^$1\$ AND status!=DONE AND targetLink~/$2\$" --format="value(name)")
  if [[ -n $operation ]]; then
    run gcloud container operations wait "$operation" "$PROJECT_FLAG" --location="$CLUSTER_LOCATION"
  fi
}
