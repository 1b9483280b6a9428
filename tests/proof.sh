#!/bin/bash
# Runs every part of the proof and prints one table of what each did. `make proof`.
set -euo pipefail

notes=${CARGO_TARGET_DIR:-target}/tmp/proof
rm -rf "$notes"
table=$'part\tchecked\tfound\tseconds\n'

# Runs a command that is to leave these notes.
part() {
  local names=$1 begin=$SECONDS name
  shift
  "$@"
  while IFS= read -r -d, name; do
    table+=$(cat "$notes/$name")$'\t'$((SECONDS - begin))$'\n'
  done <<< "$names,"
}

cargo build --workspace --all-features --examples --bins
cargo test --workspace --all-features --no-run
begin=$SECONDS
part 'model,model without a guard,model and crate' cargo test --package idempotent-consumer-model
part 'conformance' cargo test --all-features --test store_conformance
part 'equivalence' cargo test --all-features --test equivalence
part 'crash matrix' cargo test --all-features --test crash_matrix
part 'crash and chaos' cargo test --all-features --test chaos
part 'fuzz corpus' cargo test --all-features --test fuzz_corpus

echo
awk -F'\t' '{ printf "%-22s %-52s %-50s %7s\n", $1, $2, $3, $4 }' <<< "${table%$'\n'}"
echo
echo "$((SECONDS - begin)) seconds, without building"
