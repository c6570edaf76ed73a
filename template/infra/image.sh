#!/usr/bin/env bash
# Build the image in Cloud Build and push it, unless an image of the same content is there already.
source "$(dirname "$0")/lib.sh"
refuse_placeholders project_id bucket

tag=$(cd "$ROOT" && "${PYTHON:-python3}" -m ops.image_tag)
revision=$(git -C "$ROOT" rev-parse --short HEAD 2>/dev/null || echo none)

if absent "image $IMAGE_REPOSITORY:$tag" \
  gcloud artifacts docker images list "${IMAGE_REPOSITORY%/*}" "$PROJECT_FLAG" \
  --filter="package~^$IMAGE_REPOSITORY\$ AND tags~^$tag\$" --format="value(version)" --include-tags; then
  cd "$ROOT"
  run gcloud builds submit . "$PROJECT_FLAG" --region="$REGION" --config=cloudbuild.yaml \
    --service-account="projects/$PROJECT_ID/serviceAccounts/$(account_email build)" \
    --gcs-source-staging-dir="gs://$BUCKET/build-source" \
    --substitutions="_IMAGE=$IMAGE_REPOSITORY,_TAG=$tag,_REVISION=$revision"
fi
