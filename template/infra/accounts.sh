#!/usr/bin/env bash
# Two service accounts: the nodes run as one, builds run as the other. The project's default account would work only
# where an organization still makes it Editor, which is far more than either needs.
source "$(dirname "$0")/lib.sh"
refuse_placeholders project_id

# make_account SUFFIX PURPOSE ROLE: create the account and grant it one role on the project.
make_account() {
  local email
  email=$(account_email "$1")
  if absent "service account $email" \
    gcloud iam service-accounts list "$PROJECT_FLAG" --filter="email~^$email\$" --format="value(email)"; then
    run gcloud iam service-accounts create "$(account_id "$1")" "$PROJECT_FLAG" \
      --display-name="$2 of cluster $CLUSTER_NAME"
  fi
  if absent "$3 for it" \
    gcloud projects get-iam-policy "$PROJECT_ID" --flatten="bindings[].members" \
    --filter="bindings.role~^$3\$ AND bindings.members~^serviceAccount:$email\$" --format="value(bindings.role)"; then
    run gcloud projects add-iam-policy-binding "$PROJECT_ID" --member="serviceAccount:$email" --role="$3" \
      --condition=None --format=none
  fi
}

make_account nodes "Nodes" roles/container.defaultNodeServiceAccount
make_account build "Image builds" roles/logging.logWriter
