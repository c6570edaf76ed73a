#!/usr/bin/env bash
# Point kubectl at the cluster.
source "$(dirname "$0")/lib.sh"
refuse_placeholders project_id

note "kubectl's context for cluster $CLUSTER_NAME"
run gcloud container clusters get-credentials "$CLUSTER_NAME" "$PROJECT_FLAG" --location="$CLUSTER_LOCATION"
