#!/usr/bin/env python3
"""End to end: the real binary, the real template, a queue, a mapping and a table.

    .tools/venv/bin/python tests/e2e/run.py --binary target/debug/consumer

Starts ministack and a target for the effect, deploys template.yaml four times and sends messages:

* "many": 300 messages in 20 groups, a quarter of them duplicates, a few first calls fail;
* "poison": one order that always fails, in the middle of a group, left to the queue's redrive;
* "letters": one message rejected, one refused and one parked, each sent to the dead-letter queue at
  once; the refused one is mended and put back;
* "back-off": an order that fails twice, retried after the waits that are set.

With --endpoint (a running LocalStack or ministack) no emulator is started. There the function
may live in a container: --sink-host names this machine as the container sees it.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "localstack"))

try:
    import deploy
except ModuleNotFoundError as error:
    sys.exit(
        f"e2e: {error.name} is not installed: python3 -m venv .tools/venv && "
        ".tools/venv/bin/pip install -r localstack/requirements.txt, then run this with .tools/venv/bin/python"
    )
from emulator import Ministack  # noqa: E402
from sink import Sink  # noqa: E402

OUTPUT = ROOT / "target" / "e2e"

# The smallest that the template's rules allow: a failed message comes back after
# the visibility timeout, and the poison one has to come back five times.
VISIBILITY, RECEIVES, BUFFER = 18, 5, 3600
RETENTION = VISIBILITY * RECEIVES + BUFFER
PARAMETERS = {
    "FunctionTimeoutSeconds": 3,
    "VisibilityTimeoutSeconds": VISIBILITY,
    "EffectTimeoutSeconds": 1,
    "MaxReceiveCount": RECEIVES,
    "RetentionBufferSeconds": BUFFER,
    "EffectRecovery": "rerun",
}

# The first wait is between 3 and 5 s, the second between 5 and 10: not the visibility timeout.
BASE = 5
# What an emulator and a cold start of a debug build may take besides.
SLACK = 6

MESSAGES, GROUPS, DUPLICATES, BUSY = 300, 20, 75, 8


class Checks:
    """Collects verdicts; one that fails does not hide the next."""

    def __init__(self):
        self.passed = self.failed = 0

    def that(self, what, wrong=None):
        """`wrong` is what was seen instead; empty if all is well."""
        if wrong:
            self.failed += 1
            print(f"FAIL  {what}\n      {wrong}")
        else:
            self.passed += 1
            print(f"ok    {what}")

    def equal(self, what, seen, expected):
        self.that(what, None if seen == expected else f"expected {expected!r}, saw {seen!r}")


def wait(what, condition, seconds, every=0.2):
    """Polls until the condition holds; says what did not happen."""
    end = time.monotonic() + seconds
    while not (seen := condition()):
        if time.monotonic() > end:
            print(f"      gave up after {seconds} s waiting for: {what}")
            return seen
        time.sleep(every)
    return seen


class Stack:
    """One deployment and what can be seen of it."""

    def __init__(self, name, binary, url, **parameters):
        self.name = name
        self.outputs = deploy.deploy(binary, {**PARAMETERS, **parameters, "EffectUrl": url}, stack=name)
        self.sqs, self.table = deploy.client("sqs"), deploy.client("dynamodb")

    def send(self, messages):
        """(deduplication id, body) pairs, in order."""
        for start in range(0, len(messages), 10):
            answer = self.sqs.send_message_batch(
                QueueUrl=self.outputs["QueueUrl"],
                Entries=[
                    {
                        "Id": str(index),
                        "MessageBody": json.dumps(body),
                        "MessageGroupId": body["group"],
                        "MessageDeduplicationId": deduplication,
                    }
                    for index, (deduplication, body) in enumerate(messages[start : start + 10])
                ],
            )
            if answer.get("Failed"):
                raise RuntimeError(f"{self.name}: the queue refused messages: {answer['Failed']}")

    def send_text(self, group, deduplication, text, attributes=None):
        self.sqs.send_message(
            QueueUrl=self.outputs["QueueUrl"],
            MessageBody=text,
            MessageGroupId=group,
            MessageDeduplicationId=deduplication,
            MessageAttributes=attributes or {},
        )

    def depth(self, queue="QueueUrl"):
        names = ["ApproximateNumberOfMessages", "ApproximateNumberOfMessagesNotVisible"]
        answer = self.sqs.get_queue_attributes(QueueUrl=self.outputs[queue], AttributeNames=names)
        return sum(int(answer["Attributes"][name]) for name in names)

    def dead_letters(self):
        answer = self.sqs.receive_message(
            QueueUrl=self.outputs["DeadLetterQueueUrl"], MaxNumberOfMessages=10, VisibilityTimeout=0
        )
        return sorted(json.loads(message["Body"])["orderId"] for message in answer.get("Messages", []))

    def letters(self, visibility=0):
        """The messages of the dead-letter queue, with all their attributes."""
        answer = self.sqs.receive_message(
            QueueUrl=self.outputs["DeadLetterQueueUrl"],
            MaxNumberOfMessages=10,
            VisibilityTimeout=visibility,
            AttributeNames=["All"],
            MessageAttributeNames=["All"],
        )
        return answer.get("Messages", [])

    def put_back(self, letter, deduplication):
        """What a redrive does: the same body, group and attributes, under a new message id."""
        self.send_text(letter["Attributes"]["MessageGroupId"], deduplication, letter["Body"], letter["MessageAttributes"])

    def delete_letter(self, letter):
        url = self.outputs["DeadLetterQueueUrl"]
        self.sqs.delete_message(QueueUrl=url, ReceiptHandle=letter["ReceiptHandle"])

    def records(self):
        pages = self.table.get_paginator("scan").paginate(TableName=self.outputs["TableName"], ConsistentRead=True)
        return {
            item["id"]["S"]: {name: next(iter(value.values())) for name, value in item.items()}
            for page in pages
            for item in page["Items"]
        }

    def log_tail(self, lines=40):
        logs, group = deploy.client("logs"), self.outputs["LogGroupName"]
        events = []
        for stream in logs.describe_log_streams(logGroupName=group)["logStreams"]:
            page = logs.get_log_events(logGroupName=group, logStreamName=stream["logStreamName"])
            events += page["events"]
        events.sort(key=lambda event: event["timestamp"])
        messages = [event["message"].rstrip() for event in events]
        return [text for text in messages if not text.startswith(("START ", "END ", "REPORT "))][-lines:]


def many(seed):
    """Orders in their groups, their duplicates later among them, and the orders whose first call fails."""
    pick = random.Random(seed)
    orders = [
        {"orderId": f"order-{index:03}", "group": f"group-{index % GROUPS:02}", "seq": index // GROUPS, "amount": pick.randint(1, 999)}
        for index in range(MESSAGES - DUPLICATES)
    ]
    # A position of 12.5 comes after the thirteenth order and before the next.
    placed = [(index, f"first-{body['orderId']}", body) for index, body in enumerate(orders)]
    for index in pick.sample(range(len(orders)), DUPLICATES):
        later = pick.choice([index, pick.randrange(index, len(orders))]) + 0.5
        # Another deduplication id: SQS lets it through, as after its five minutes.
        placed.append((later, f"again-{orders[index]['orderId']}", orders[index]))
    placed.sort(key=lambda entry: entry[0])
    # Each in a group of its own, so that the waits for redelivery overlap.
    groups = pick.sample(range(GROUPS), BUSY)
    busy = [orders[group + GROUPS * pick.randrange(len(orders) // GROUPS)]["orderId"] for group in groups]
    return orders, [(deduplication, body) for _, deduplication, body in placed], busy


def poison():
    bodies = [{"orderId": f"poison-{seq}", "group": "poison", "seq": seq, "amount": seq} for seq in range(5)]
    return bodies, bodies[2]["orderId"]


def letter_bodies():
    """A group in which the second, third and fourth message come to nothing: as texts, in order."""
    return [
        '{"orderId": "letters-0", "group": "letters", "seq": 0}',
        '{"group": "letters",\t"seq": 1, "note": "no key, \u00e4 \u4e16 \U0001f600" }\n',
        '{ "orderId":"letters-2" , "group": "letters", "seq":2, "amount": 1990.0}',
        '{"orderId": "letters-3", "group": "letters", "seq": 3}',
        '{"orderId": "letters-4", "group": "letters", "seq": 4}',
    ]


def slow_group():
    return [{"orderId": f"slow-{seq}", "group": "slow", "seq": seq} for seq in range(3)]


def attribute(letter, name):
    return letter["MessageAttributes"].get(name, {}).get("StringValue")


def check_letters(checks, stack, sink, sent):
    """What was given up: at once, once, whole, and not in the way of its group."""
    bodies = letter_bodies()
    wait("three dead letters and an empty queue", lambda: stack.depth("DeadLetterQueueUrl") >= 3 and stack.depth() == 0, 60)
    letters = stack.letters()
    checks.equal("letters: bodies arrived byte for byte, in order", [letter["Body"] for letter in letters], bodies[1:4])
    if len(letters) != 3:
        return
    kinds = [(attribute(letter, "dead-letter-reason") or "").partition(":")[0] for letter in letters]
    checks.equal("letters: each says why", kinds, ["rejected", "permanent", "parked"])
    names = {"dead-letter-reason", "original-message-id", "original-deduplication-id", "original-source-arn", "first-received-at"}
    expected = [names, names | {"idempotency-key", "idempotency-attempt"}, names | {"idempotency-key", "idempotency-attempt"}]
    checks.equal("letters: each with its facts", [set(letter["MessageAttributes"]) for letter in letters], expected)
    keys = [attribute(letter, "idempotency-key") for letter in letters]
    checks.equal("letters: each with its key", keys, [None, f"{stack.name}#letters-2", f"{stack.name}#letters-3"])
    checks.equal("letters: each from the queue", {attribute(x, "original-source-arn") for x in letters}, {stack.outputs["QueueArn"]})
    checks.equal("letters: in the same group", {x["Attributes"]["MessageGroupId"] for x in letters}, {"letters"})
    deduplication = {letter["Attributes"]["MessageDeduplicationId"] for letter in letters}
    checks.that("letters: fresh deduplication ids", None if len(deduplication - {"letters-1", "letters-2", "letters-3"}) == 3 else deduplication)
    after = [int(letter["Attributes"]["SentTimestamp"]) / 1000 - sent for letter in letters]
    # The parked one needs a second receive, after a wait of a second.
    limits = [SLACK, SLACK, SLACK + 2]
    late = [f"{seconds:.1f} s" for seconds, limit in zip(after, limits) if seconds > limit]
    checks.that(f"letters: within seconds, not {VISIBILITY} s x {RECEIVES} receives", late)
    effects = [key for key, body in sink.effects() if body.get("group") == "letters"]
    checks.equal("letters: their group went on, in order", effects, ["letters-0", "letters-4"])
    print("      letters: " + ", ".join(f"{kind} after {seconds:.1f} s" for kind, seconds in zip(kinds, after)))

    # Mended, the refused one goes back as it is, and a copy after it.
    sink.mend("letters-2")
    for copy in ("put-back", "put-back-again"):
        stack.put_back(letters[1], copy)
    wait("what was put back to be done", lambda: stack.depth() == 0, 60)
    statuses = [status for _, status in sink.calls_of("letters-2")]
    checks.equal("letters: after a mend the message runs once, under the key it had", statuses, [422, 200])
    record = stack.records().get(f"{stack.name}#letters-2", {})
    checks.equal("letters: and its record is completed", record.get("status"), "COMPLETED")
    checks.equal("letters: nothing was given up twice", stack.depth("DeadLetterQueueUrl"), 3)


def check_back_off(checks, stack, sink):
    """The waits that the sink sees between calls are those that were set."""
    wait("the queue of back-off to drain", lambda: stack.depth() == 0, 60)
    calls = sink.calls_of("slow-1")
    checks.equal("back-off: failed twice, then done", [status for _, status in calls], [503, 503, 200])
    waits = [later[0] - earlier[0] for earlier, later in zip(calls, calls[1:])]
    limits = [(BASE / 2, BASE), (BASE, 2 * BASE)]
    wrong = [
        f"waited {seconds:.1f} s, not {low} to {high} s"
        for seconds, (low, high) in zip(waits, limits)
        if not low <= seconds <= high + SLACK
    ]
    checks.that(f"back-off: retried after the waits that were set, not after {VISIBILITY} s", wrong)
    effects = [key for key, body in sink.effects() if body.get("group") == "slow"]
    checks.equal("back-off: in order all the same", effects, [f"slow-{seq}" for seq in range(3)])
    checks.equal("back-off: dead-letter queue empty", stack.depth("DeadLetterQueueUrl"), 0)
    print("      back-off: " + ", ".join(f"retried after {seconds:.1f} s" for seconds in waits))


def check_effects(checks, label, orders, effects):
    count = Counter(key for key, _ in effects)
    wrong = {body["orderId"]: count[body["orderId"]] for body in orders if count[body["orderId"]] != 1}
    checks.that(f"{label}: each of {len(orders)} orders took effect exactly once", wrong and f"times per order: {wrong}")
    sequences = defaultdict(list)
    for _, body in effects:
        sequences[body.get("group")].append(body.get("seq"))
    wrong = {group: seen for group, seen in sequences.items() if seen != sorted(seen)}
    checks.that(f"{label}: in order within each of {len(sequences)} groups", wrong)


def check_records(checks, label, orders, stack):
    records = stack.records()
    # Without a scope of its own the stack's name is the scope.
    expected = {f"{stack.name}#{body['orderId']}" for body in orders}
    checks.that(
        f"{label}: one record per order, under the stack's scope",
        None if set(records) == expected else f"missing {sorted(expected - set(records))[:5]}, "
        f"unexpected {sorted(set(records) - expected)[:5]}",
    )
    status = Counter(record["status"] for record in records.values())
    checks.equal(f"{label}: every record is completed", dict(status), {"COMPLETED": len(orders)})
    held = [key for key, record in records.items() if "owner" in record or "in_progress_expiration" in record]
    checks.that(f"{label}: no record keeps an owner or a lease", held[:5])
    wrong = {
        key: f"expiration {record.get('expiration')}, completed_at {record.get('completed_at')}"
        for key, record in records.items()
        if int(record.get("expiration", 0)) != int(record.get("completed_at", 0)) // 1000 + RETENTION
    }
    checks.that(f"{label}: remembered for {VISIBILITY} s x {RECEIVES} + {BUFFER} s", dict(list(wrong.items())[:5]))


def refuses_short_visibility(binary, url):
    """The template's rules, as CloudFormation applies them."""
    try:
        parameters = {**PARAMETERS, "EffectUrl": url, "FunctionTimeoutSeconds": 5}
        deploy.deploy(binary, parameters, stack="refused")
    except (deploy.DeployError, deploy.ClientError) as error:
        return None if "FunctionTimeoutSeconds 5 needs" in str(error) else f"refused, but with: {error}"
    return f"deployed with a function timeout of 5 s and a visibility timeout of {VISIBILITY} s"


def small_copy(binary, folder):
    """Debug binaries are big: the copy that is uploaded goes without symbols."""
    copy = Path(folder) / "bootstrap"
    shutil.copy(binary, copy)
    if copy.read_bytes()[:4] == b"\x7fELF" and shutil.which("strip"):
        subprocess.run(["strip", copy], check=True)
    return copy


def run(arguments, checks):
    started = time.monotonic()
    orders, messages, busy = many(arguments.seed)
    poisoned, refused = poison()
    mates = [body for body in poisoned if body["orderId"] != refused]
    failing = {**dict.fromkeys(busy, 1), "letters-3": 1, "slow-1": 2}
    sink = Sink(arguments.sink_host, busy=failing, refused=[refused, "letters-2"])
    scratch = tempfile.TemporaryDirectory(prefix="e2e-")
    emulator = None
    stacks = []
    try:
        if not arguments.endpoint:
            emulator = Ministack(OUTPUT / "ministack.log")
            if not wait("ministack to be ready", emulator.ready, 30):
                raise RuntimeError(f"ministack is not ready; see {emulator.log}")
        os.environ["AWS_ENDPOINT_URL"] = arguments.endpoint or emulator.url
        binary = small_copy(arguments.binary, scratch.name)
        if emulator:
            checks.that("rules: a visibility timeout below six times is refused", refuses_short_visibility(binary, sink.url))
        at_once = {"SendDeadLettersAtOnce": "true", "RetryBackOff": "on"}
        stacks += [
            Stack("e2e-poison", binary, sink.url, SendDeadLettersAtOnce="false"),
            Stack("e2e-many", binary, sink.url),
            # An unknown outcome is parked at the next receive: let that come soon.
            Stack("e2e-letters", binary, sink.url, **at_once, RetryBackOffBaseSeconds=1, EffectRecovery="park"),
            Stack("e2e-back-off", binary, sink.url, **at_once, RetryBackOffBaseSeconds=BASE),
        ]
        poison_stack, many_stack, letters_stack, back_off_stack = stacks
        deployed = time.monotonic()

        # The poison order needs its redeliveries: let them pass while the many are at work.
        poison_stack.send([(body["orderId"], body) for body in poisoned])
        back_off_stack.send([(body["orderId"], body) for body in slow_group()])
        sent = time.time()
        for seq, text in enumerate(letter_bodies()):
            letters_stack.send_text("letters", f"letters-{seq}", text)
        check_letters(checks, letters_stack, sink, sent)
        check_back_off(checks, back_off_stack, sink)
        many_stack.send(messages)
        deployed = time.monotonic()

        emptied = wait("the queue of many to drain", lambda: many_stack.depth() == 0, 90)
        drained = f"drained in {time.monotonic() - deployed:.1f} s" if emptied else "not drained"
        effects = [(key, body) for key, body in sink.effects() if body.get("group", "").startswith("group-")]
        check_effects(checks, "many", orders, effects)
        checks.equal("many: queue drained", many_stack.depth(), 0)
        checks.equal("many: dead-letter queue empty", many_stack.depth("DeadLetterQueueUrl"), 0)
        failed = sorted(key for key, status, _, _ in sink.calls if status == 503 and key in busy)
        checks.equal("many: each order that was to fail at first did so once", failed, sorted(busy))
        check_records(checks, "many", orders, many_stack)

        wait(
            "the poison order to reach the dead-letter queue and its group to be done",
            lambda: poison_stack.depth() == 0 and poison_stack.depth("DeadLetterQueueUrl") > 0,
            VISIBILITY * (RECEIVES + 2),
        )
        effects = [(key, body) for key, body in sink.effects() if body.get("group") == "poison"]
        checks.equal("poison: only that order is in the dead-letter queue", poison_stack.dead_letters(), [refused])
        check_effects(checks, "poison", mates, effects)
        checks.equal("poison: queue drained", poison_stack.depth(), 0)
        bare = [key for key, _, _, headers in sink.calls if not (headers.get("Message-Id") and headers.get("Idempotency-Attempt"))]
        checks.that("every call carries Message-Id and Idempotency-Attempt", bare[:5])

        statuses = Counter(status for _, status, _, _ in sink.calls)
        print(
            f"\n{len(messages)} messages for {len(orders)} orders in {GROUPS} groups, seed {arguments.seed}: "
            f"{drained} (one redelivery takes {VISIBILITY} s)\n"
            f"calls: {statuses[200]} took effect, {statuses[503]} were busy, {statuses[422]} refused; "
            f"whole run {time.monotonic() - started:.1f} s"
        )
    finally:
        if checks.failed or sys.exc_info()[0]:
            for stack in stacks:
                print(f"\nlast log lines of {stack.name}:", *log_tail(stack), sep="\n  ")
            if emulator:
                # A function that does not start leaves its reason there.
                errors = [line for line in emulator.log.read_text(errors="replace").splitlines() if " ERROR " in line]
                print(f"\nlast errors of the emulator, from {emulator.log}:", *errors[-5:], sep="\n  ")
        sink.stop()
        if emulator:
            emulator.stop()
        scratch.cleanup()


def log_tail(stack):
    try:
        return stack.log_tail()
    except Exception as error:  # the verdict matters more than the log
        return [f"cannot be read: {error}"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", type=Path, required=True, help="the built consumer")
    parser.add_argument("--endpoint", help="a running emulator instead of a ministack of our own")
    parser.add_argument("--sink-host", default="127.0.0.1", help="where the function reaches this machine")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    if not arguments.binary.is_file():
        sys.exit(f"e2e: no binary at {arguments.binary}: cargo build --features http,sqs --bin consumer")
    OUTPUT.mkdir(parents=True, exist_ok=True)
    checks = Checks()
    try:
        run(arguments, checks)
    except Exception as error:
        checks.that("the run itself", f"{type(error).__name__}: {error}")
    print(f"e2e: {checks.passed} passed, {checks.failed} failed")
    sys.exit(1 if checks.failed else 0)


if __name__ == "__main__":
    main()
