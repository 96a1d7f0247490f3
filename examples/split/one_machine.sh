#!/usr/bin/env bash
# Vendor and customer on one machine, over TLS, with certificates made on the spot.
#
#   examples/split/one_machine.sh MODEL TRAIN EVAL [options of `fastdp split customer`]
#
# MODEL is a folder or name of a BERT, RoBERTa, GPT-2 or Llama model; TRAIN and EVAL are .csv, .tsv or .jsonl files with the
# columns sentence and label. Run it again after a stop, and it goes on.
set -euo pipefail
model=$1 train=$2 eval=$3
shift 3
folder=${FOLDER:-split-run}
mkdir -p "$folder"
fastdp split vendor --model "$model" --folder "$folder/vendor" --certificates "$folder/certificates" --max-tokens 64 &
vendor=$!
trap 'kill "$vendor" 2>/dev/null; wait "$vendor" || true' EXIT
until [ -e "$folder/certificates/customer/key.pem" ]; do
    kill -0 "$vendor"
    sleep 0.5
done
# The customer waits for the vendor to listen.
fastdp split customer --folder "$folder/customer" --certificates "$folder/certificates/customer" \
    --tokenizer "$model" --train "$train" --eval "$eval" --eta 16 "$@"
