#!/usr/bin/env python3
"""What has to hold of template.yaml and the files beside it, whoever deploys them.

    .tools/venv/bin/python tests/template_test.py

A linter that reads a SAM template finds nothing in SAM's own resources, so it is expanded
first. What no linter knows (a visibility timeout of six times the function's, a batching
window on a FIFO queue) are checks of our own. Each check is also run on templates that are
broken on purpose: one that lets them pass checks nothing.
"""

import copy
import json
import re
import subprocess
import sys
import tempfile
import tomllib
import unittest
from itertools import product
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "localstack"))

try:
    import deploy
    import yaml
except ModuleNotFoundError as error:
    sys.exit(
        f"template: {error.name} is not installed: python3 -m venv .tools/venv && "
        ".tools/venv/bin/pip install -r localstack/requirements.txt, then run this with .tools/venv/bin/python"
    )

FOURTEEN_DAYS = 14 * 24 * 3600

# What the function reads, apart from what Lambda itself sets.
ENVIRONMENT = {
    "TABLE_NAME": "Table",
    "VISIBILITY_TIMEOUT_SECONDS": "VisibilityTimeoutSeconds",
    "MAX_RECEIVE_COUNT": "MaxReceiveCount",
    "RETENTION_BUFFER_SECONDS": "RetentionBufferSeconds",
    "BODY": "Body",
    "IGNORE_MESSAGES": "IgnoreMessages",
    "IDEMPOTENCY_KEY": "IdempotencyKey",
    "IDEMPOTENCY_SCOPE": "IdempotencyScope",
    "IDEMPOTENCY_FINGERPRINT": "IdempotencyFingerprint",
    "EFFECT_URL": "EffectUrl",
    "EFFECT_ALLOW_HTTP": "EffectAllowHttp",
    "EFFECT_QUOTE_ANSWERS": "EffectQuoteAnswers",
    "EFFECT_TIMEOUT_SECONDS": "EffectTimeoutSeconds",
    "EFFECT_RECOVERY": "EffectRecovery",
    "MAX_CONCURRENCY": "MaxConcurrency",
    "STORE_OUTAGE": "StoreOutage",
    "QUEUE_URL": "Queue",
    "DEAD_LETTER_QUEUE_URL": "DeadLetterQueue",
    "RETRY_BACK_OFF": "RetryBackOff",
    "RETRY_BACK_OFF_BASE_SECONDS": "RetryBackOffBaseSeconds",
}

# What the function and its event source mapping do, and on what.
# https://docs.aws.amazon.com/lambda/latest/dg/services-sqs-configure.html names the three of SQS.
PERMISSIONS = {
    "Table": {"dynamodb:GetItem", "dynamodb:PutItem", "dynamodb:UpdateItem", "dynamodb:DeleteItem"},
    "Queue": {"sqs:ReceiveMessage", "sqs:DeleteMessage", "sqs:GetQueueAttributes"},
    "LogGroup": {"logs:CreateLogStream", "logs:PutLogEvents"},
}

# What it may do besides, under a condition.
CONDITIONAL_PERMISSIONS = {
    "SendsDeadLetters": {"DeadLetterQueue": {"sqs:SendMessage"}},
    "BacksOff": {"Queue": {"sqs:ChangeMessageVisibility"}},
}

# cfn-lint findings that are meant to stay: id and reason. None so far.
ACCEPTED_FINDINGS = {}


class Template:
    """A template as written and as SAM expands it."""

    def __init__(self, source):
        self.source = source
        self.expanded = deploy.expand(copy.deepcopy(source), architecture=None)
        self.parameters = self.expanded["Parameters"]
        self.resources = self.expanded["Resources"]

    def properties(self, name):
        return self.resources[name]["Properties"]

    def one(self, kind):
        found = [resource["Properties"] for resource in self.resources.values() if resource["Type"] == kind]
        assert len(found) == 1, f"{len(found)} resources of type {kind}, expected one"
        return found[0]

    def default(self, name):
        return str(self.parameters[name]["Default"])

    def allowed(self, name):
        return [str(value) for value in self.parameters[name]["AllowedValues"]]

    def accepts(self, **values):
        """Whether the Rules let these parameter values through."""
        parameters = {name: str(p["Default"]) for name, p in self.parameters.items() if "Default" in p}
        parameters.update({name: str(value) for name, value in values.items()})
        return all(
            evaluate(assertion["Assert"], parameters)
            for rule in self.expanded.get("Rules", {}).values()
            if evaluate(rule.get("RuleCondition", True), parameters)
            for assertion in rule["Assertions"]
        )


def evaluate(node, parameters):
    """CloudFormation's rule functions, as many as the template uses."""
    if not isinstance(node, dict):
        return node
    [(function, argument)] = node.items()
    if function == "Ref":
        return parameters[argument]
    if function in ("Fn::Equals", "Fn::Contains"):
        left, right = (
            [evaluate(member, parameters) for member in side] if isinstance(side, list) else evaluate(side, parameters)
            for side in argument
        )
        return left == right if function == "Fn::Equals" else right in left
    raise AssertionError(f"{function} in Rules: this test does not know it")


def ref(name):
    return {"Ref": name}


def arn(name):
    return {"Fn::GetAtt": [name, "Arn"]}


def equal(seen, expected, what):
    assert seen == expected, f"{what}: {seen!r}, expected {expected!r}"


# --- checks: each takes a template and raises AssertionError -------------------------------


def check_lint(template):
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(template.expanded, file)
        file.flush()
        # The one that was installed with this interpreter.
        linter = Path(sys.executable).with_name("cfn-lint")
        command = [linter, "--format", "json", "--include-checks", "I", "--", file.name]
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
    if not answer.stdout.strip().startswith("["):
        # Not an assertion: a linter that does not run must not pass for one that finds something.
        raise RuntimeError(f"cfn-lint did not run: {answer.stderr or answer.stdout}")
    findings = [
        f"{finding['Rule']['Id']} at {'/'.join(map(str, finding['Location']['Path']))}: {finding['Message']}"
        for finding in json.loads(answer.stdout)
        if finding["Rule"]["Id"] not in ACCEPTED_FINDINGS
    ]
    assert not findings, "cfn-lint finds:\n" + "\n".join(findings)


def check_mapping(template):
    mapping = template.one("AWS::Lambda::EventSourceMapping")
    equal(mapping["EventSourceArn"], arn("Queue"), "source of the mapping")
    assert 1 <= mapping["BatchSize"] <= 10, "a FIFO queue gives at most 10 messages at once"
    assert not mapping.get("MaximumBatchingWindowInSeconds"), "a FIFO queue allows no batching window"
    equal(mapping.get("FunctionResponseTypes"), ["ReportBatchItemFailures"], "answer that Lambda heeds")
    equal(mapping["ScalingConfig"], {"MaximumConcurrency": ref("MapperMaximumConcurrency")}, "scaling")
    limits = template.parameters["MapperMaximumConcurrency"]
    assert limits["MinValue"] >= 2 and limits["MaxValue"] <= 1000, "Lambda allows a maximum concurrency of 2 to 1000"


def check_visibility(template):
    timeouts, visibilities = template.allowed("FunctionTimeoutSeconds"), template.allowed("VisibilityTimeoutSeconds")
    for timeout, visibility in product(timeouts, visibilities):
        accepted = template.accepts(
            FunctionTimeoutSeconds=timeout, VisibilityTimeoutSeconds=visibility, EffectTimeoutSeconds=1
        )
        equal(
            accepted,
            int(visibility) >= 6 * int(timeout),
            f"rules on a function timeout of {timeout} s and a visibility timeout of {visibility} s",
        )
    assert all(1 <= int(timeout) <= 900 for timeout in timeouts), "Lambda allows 1 to 900 s"
    assert all(int(visibility) <= 43200 for visibility in visibilities), "SQS allows up to 12 hours"


def check_effect_timeout(template):
    effects = template.allowed("EffectTimeoutSeconds")
    for timeout, effect in product(template.allowed("FunctionTimeoutSeconds"), effects):
        accepted = template.accepts(
            FunctionTimeoutSeconds=timeout, VisibilityTimeoutSeconds=43200, EffectTimeoutSeconds=effect
        )
        equal(
            accepted,
            int(effect) + 2 <= int(timeout),
            f"rules on a function timeout of {timeout} s and an effect timeout of {effect} s",
        )


def check_one_set_of_numbers(template):
    """Queue, function and environment read the same parameters, never a number of their own."""
    queue, function = template.properties("Queue"), template.properties("Function")
    environment = function["Environment"]["Variables"]
    equal(queue["VisibilityTimeout"], ref("VisibilityTimeoutSeconds"), "visibility timeout of the queue")
    equal(queue["RedrivePolicy"]["maxReceiveCount"], ref("MaxReceiveCount"), "receives of the queue")
    equal(function["Timeout"], ref("FunctionTimeoutSeconds"), "timeout of the function")
    for variable in ("VISIBILITY_TIMEOUT_SECONDS", "MAX_RECEIVE_COUNT", "RETENTION_BUFFER_SECONDS"):
        equal(environment[variable], ref(ENVIRONMENT[variable]), variable)
    assert template.accepts(), "the rules refuse the template's own defaults"
    receives = int(template.default("MaxReceiveCount"))
    redelivery = int(template.default("VisibilityTimeoutSeconds")) * receives
    retention = redelivery + int(template.default("RetentionBufferSeconds"))
    equal(retention, 180 * 5 + 86400, "retention by default")
    assert redelivery < queue["MessageRetentionPeriod"], "the queue drops messages before their last delivery"
    assert template.parameters["MaxReceiveCount"]["MinValue"] >= 5, (
        "with fewer than 5 receives a throttled function loses messages to the dead-letter queue"
    )
    assert template.parameters["RetentionBufferSeconds"]["MinValue"] >= 0


def check_queues(template):
    queue, letters = template.properties("Queue"), template.properties("DeadLetterQueue")
    equal(queue["RedrivePolicy"]["deadLetterTargetArn"], arn("DeadLetterQueue"), "where failed messages go")
    for name, properties in (("Queue", queue), ("DeadLetterQueue", letters)):
        assert properties.get("FifoQueue") is True, f"{name} is not FIFO"
        equal(properties.get("DeduplicationScope"), "messageGroup", f"deduplication of {name}")
        equal(properties.get("FifoThroughputLimit"), "perMessageGroupId", f"throughput of {name}")
        assert properties.get("SqsManagedSseEnabled") is True, f"{name} is not encrypted"
    equal(letters["MessageRetentionPeriod"], FOURTEEN_DAYS, "time to mend what is in the dead-letter queue")
    equal(letters["MaximumMessageSize"], 1024 * 1024, "room for a message and the reason")


def check_table(template):
    table = template.properties("Table")
    equal(table["KeySchema"], [{"AttributeName": "id", "KeyType": "HASH"}], "key of the table")
    equal(table["AttributeDefinitions"], [{"AttributeName": "id", "AttributeType": "S"}], "type of the key")
    equal(table["TimeToLiveSpecification"], {"AttributeName": "expiration", "Enabled": True}, "time to live")
    equal(table["BillingMode"], "PAY_PER_REQUEST", "billing")
    equal(table["PointInTimeRecoverySpecification"], {"PointInTimeRecoveryEnabled": True}, "recovery")
    assert table.get("DeletionProtectionEnabled") is True, "the table can be deleted by mistake"


def check_data_outlives_the_stack(template):
    for name in ("Table", "Queue", "DeadLetterQueue"):
        for policy in ("DeletionPolicy", "UpdateReplacePolicy"):
            equal(template.resources[name].get(policy), "Retain", f"{policy} of {name}")


def check_function(template):
    function, written = template.properties("Function"), template.source["Resources"]["Function"]
    equal(function["Runtime"], "provided.al2023", "runtime")
    equal(function["Architectures"], ["arm64"], "architecture")
    equal(function["Handler"], "bootstrap", "handler")
    equal(
        written["Metadata"],
        {"BuildMethod": "rust-cargolambda", "BuildProperties": {"Binary": "consumer"}},
        "how SAM builds the function",
    )
    logging = function["LoggingConfig"]
    equal(logging["LogFormat"], "JSON", "format of the log")
    equal(logging["LogGroup"], ref("LogGroup"), "log group")
    equal(template.properties("LogGroup")["RetentionInDays"], ref("LogRetentionDays"), "days that the log is kept")


def check_environment(template):
    variables = template.properties("Function")["Environment"]["Variables"]
    equal(set(variables), set(ENVIRONMENT), "environment of the function")
    for name, value in variables.items():
        # The scope is {"Fn::If": [it is given, it, otherwise]}.
        value = value["Fn::If"][1] if "Fn::If" in value else value
        equal(value, ref(ENVIRONMENT[name]), name)
    switched = {"Fn::If": ["SendsDeadLetters", ref("DeadLetterQueue"), ""]}
    equal(variables["DEAD_LETTER_QUEUE_URL"], switched, "dead-letter queue that the function is told")
    # A generated name changes with the function, and with it every record's id.
    assert "Function" not in json.dumps(variables["IDEMPOTENCY_SCOPE"]), "the scope follows the function's name"


def check_role(template):
    role = template.one("AWS::IAM::Role")
    equal(template.properties("Function")["Role"], arn("FunctionRole"), "role of the function")
    assert not role.get("ManagedPolicyArns"), "a managed policy grants more than is used"
    statements = [s for policy in role["Policies"] for s in policy["PolicyDocument"]["Statement"]]
    granted, conditional = {}, {}
    for statement in statements:
        permissions = granted
        if "Fn::If" in statement:
            condition, statement, otherwise = statement["Fn::If"]
            equal(otherwise, ref("AWS::NoValue"), f"what is granted without {condition}")
            permissions = conditional.setdefault(condition, {})
        equal(statement["Effect"], "Allow", f"effect of {statement.get('Sid')}")
        resource = statement["Resource"]
        assert isinstance(resource, dict) and set(resource) == {"Fn::GetAtt"}, f"{resource!r} is not one resource's ARN"
        permissions.setdefault(resource["Fn::GetAtt"][0], set()).update(statement["Action"])
    equal(granted, PERMISSIONS, "permissions")
    equal(conditional, CONDITIONAL_PERMISSIONS, "permissions under a condition")
    [trust] = role["AssumeRolePolicyDocument"]["Statement"]
    equal(trust["Principal"], {"Service": "lambda.amazonaws.com"}, "who may take the role")


def check_switches(template):
    """What the function does by itself, and the permissions that go with it."""
    conditions = template.expanded["Conditions"]
    equal(conditions["SendsDeadLetters"], {"Fn::Equals": [ref("SendDeadLettersAtOnce"), "true"]}, "when letters are sent")
    equal(conditions["BacksOff"], {"Fn::Equals": [ref("RetryBackOff"), "on"]}, "when visibility is changed")
    equal(template.default("SendDeadLettersAtOnce"), "true", "dead letters at once, by default")
    # Faster receives are used up sooner: whoever wants them raises MaxReceiveCount too.
    equal(template.default("RetryBackOff"), "off", "back-off, by default")
    shortest = min(int(value) for value in template.allowed("VisibilityTimeoutSeconds"))
    bases = [int(value) for value in template.allowed("RetryBackOffBaseSeconds")]
    assert 1 <= min(bases) and max(bases) <= shortest, "a first wait that some visibility timeout does not allow"


def check_alarms(template):
    alarms = {
        resource["Properties"]["MetricName"]: resource["Properties"]
        for resource in template.resources.values()
        if resource["Type"] == "AWS::CloudWatch::Alarm"
    }
    watched = {
        "ApproximateNumberOfMessagesVisible": {"Fn::GetAtt": ["DeadLetterQueue", "QueueName"]},
        "ApproximateAgeOfOldestMessage": {"Fn::GetAtt": ["Queue", "QueueName"]},
        "Errors": ref("Function"),
    }
    equal(set(alarms), set(watched), "metrics with an alarm")
    for metric, alarm in alarms.items():
        equal([dimension["Value"] for dimension in alarm["Dimensions"]], [watched[metric]], f"what {metric} watches")
        equal(alarm["TreatMissingData"], "notBreaching", f"missing data of {metric}")
        assert "AlarmTopicArn" in json.dumps(alarm.get("AlarmActions")), f"{metric} tells nobody"
    equal(alarms["ApproximateNumberOfMessagesVisible"]["Threshold"], 0, "dead letters that are fine")


def check_decisions(template):
    """What no default can decide."""
    for name in ("EffectUrl", "EffectRecovery"):
        assert "Default" not in template.parameters[name], f"{name} has a default"
    equal(template.allowed("EffectRecovery"), ["rerun", "verify", "park"], "ways to recover")
    equal(template.allowed("StoreOutage"), ["reject", "process"], "what to do while the table is down")
    equal(template.default("StoreOutage"), "reject", "what to do while the table is down, by default")


def check_outputs(template):
    wanted = {"QueueUrl", "QueueArn", "DeadLetterQueueUrl", "DeadLetterQueueArn", "TableName", "FunctionName"}
    missing = wanted - set(template.expanded["Outputs"])
    assert not missing, f"outputs missing: {sorted(missing)}"


# --- templates broken on purpose -------------------------------------------------------------


def put(path, value):
    """A change of one place: "Queue/Properties/FifoQueue" of Resources, or "/Parameters/..." of the whole."""

    def change(source):
        *parents, last = path[1:].split("/") if path.startswith("/") else ["Resources", *path.split("/")]
        for name in parents:
            source = source[name]
        if value is None:
            del source[last]
        else:
            source[last] = value

    return change


def allow(action, resource):
    def change(source):
        [policy] = source["Resources"]["FunctionRole"]["Properties"]["Policies"]
        statement = {"Effect": "Allow", "Action": [action], "Resource": resource}
        policy["PolicyDocument"]["Statement"].append(statement)

    return change


def accept_too_short(source):
    rule = source["Rules"]["FunctionTimeout30"]["Assertions"][0]["Assert"]
    rule["Fn::Contains"][0].append("90")


def refuse_long_enough(source):
    rule = source["Rules"]["FunctionTimeout30"]["Assertions"][0]["Assert"]
    rule["Fn::Contains"][0].remove("180")


def accept_slow_effect(source):
    rule = source["Rules"]["FunctionTimeout30"]["Assertions"][1]["Assert"]
    rule["Fn::Contains"][0].append("30")


FUNCTION = "Function/Properties"
EVENT = f"{FUNCTION}/Events/Messages/Properties"
BROKEN = [
    ("a misspelt property", check_lint, put("Queue/Properties/VisibilityTimeOut", 30)),
    ("a standard dead-letter queue, to the linter", check_lint, put("DeadLetterQueue/Properties", {})),
    ("a batch of 20", check_mapping, put(f"{EVENT}/BatchSize", 20)),
    ("a batching window", check_mapping, put(f"{EVENT}/MaximumBatchingWindowInSeconds", 5)),
    ("failures that are not reported", check_mapping, put(f"{EVENT}/FunctionResponseTypes", None)),
    ("a concurrency of 1", check_mapping, put("/Parameters/MapperMaximumConcurrency/MinValue", 1)),
    ("no rules", check_visibility, put("/Rules", None)),
    ("no rule for one timeout", check_visibility, put("/Rules/FunctionTimeout900", None)),
    ("a rule that accepts too short a visibility", check_visibility, accept_too_short),
    ("a rule that refuses a visibility that is long enough", check_visibility, refuse_long_enough),
    ("an effect as slow as the function", check_effect_timeout, accept_slow_effect),
    ("a visibility of its own in the queue", check_one_set_of_numbers, put("Queue/Properties/VisibilityTimeout", 180)),
    (
        "receives of its own in the environment",
        check_one_set_of_numbers,
        put(f"{FUNCTION}/Environment/Variables/MAX_RECEIVE_COUNT", "5"),
    ),
    ("three receives", check_one_set_of_numbers, put("/Parameters/MaxReceiveCount/MinValue", 3)),
    ("defaults that the rules refuse", check_one_set_of_numbers, put("/Parameters/VisibilityTimeoutSeconds/Default", 90)),
    ("a standard dead-letter queue", check_queues, put("DeadLetterQueue/Properties/FifoQueue", None)),
    ("dead letters kept for four days", check_queues, put("DeadLetterQueue/Properties/MessageRetentionPeriod", 345600)),
    ("another TTL attribute", check_table, put("Table/Properties/TimeToLiveSpecification/AttributeName", "expires_at")),
    ("a table that goes with the stack", check_data_outlives_the_stack, put("Table/DeletionPolicy", "Delete")),
    ("another binary", check_function, put("Function/Metadata/BuildProperties/Binary", "reconciler")),
    ("a variable too many", check_environment, put(f"{FUNCTION}/Environment/Variables/RUST_LOG", "debug")),
    ("a variable too few", check_environment, put(f"{FUNCTION}/Environment/Variables/EFFECT_RECOVERY", None)),
    (
        "a scope that changes with the function",
        check_environment,
        put(f"{FUNCTION}/Environment/Variables/IDEMPOTENCY_SCOPE", None),
    ),
    (
        "a managed policy",
        check_role,
        put("FunctionRole/Properties/ManagedPolicyArns", ["arn:aws:iam::aws:policy/AmazonSQSFullAccess"]),
    ),
    ("a permission too many", check_role, allow("dynamodb:Scan", arn("Table"))),
    ("dead letters that may always be sent", check_role, allow("sqs:SendMessage", arn("DeadLetterQueue"))),
    (
        "a dead-letter queue without the permission",
        check_environment,
        put(f"{FUNCTION}/Environment/Variables/DEAD_LETTER_QUEUE_URL", ref("DeadLetterQueue")),
    ),
    ("a first wait above a visibility timeout", check_switches, put("/Parameters/RetryBackOffBaseSeconds/AllowedValues", [30])),
    ("back-off for everyone", check_switches, put("/Parameters/RetryBackOff/Default", "on")),
    ("letters too small for their messages", check_queues, put("DeadLetterQueue/Properties/MaximumMessageSize", 262144)),
    ("a permission on everything", check_role, allow("dynamodb:GetItem", "*")),
    ("an alarm that sounds without data", check_alarms, put("DeadLetterAlarm/Properties/TreatMissingData", "breaching")),
    ("no alarm on errors", check_alarms, put("ErrorsAlarm", None)),
    ("recovery decided for everyone", check_decisions, put("/Parameters/EffectRecovery/Default", "rerun")),
    ("no queue to send to", check_outputs, put("/Outputs/QueueUrl", None)),
]

CHECKS = [check for name, check in sorted(globals().items()) if name.startswith("check_")]


def load():
    return deploy.yaml_parse(deploy.TEMPLATE.read_text())


class TemplateTest(unittest.TestCase):
    """The template as it is; one test per check, added below."""

    @classmethod
    def setUpClass(cls):
        cls.template = Template(load())


class BrokenTemplateTest(unittest.TestCase):
    """Each check on templates that it must refuse; one test per template, added below."""

    def test_every_check_refuses_something(self):
        unused = {check.__name__ for check in CHECKS} - {check.__name__ for _, check, _ in BROKEN}
        self.assertFalse(unused, "no broken template shows that these checks can fail")


def add_tests():
    for check in CHECKS:
        test = lambda self, check=check: check(self.template)  # noqa: E731
        setattr(TemplateTest, check.__name__.replace("check_", "test_"), test)

    for what, check, change in BROKEN:

        def test(self, check=check, change=change):
            source = load()
            change(source)
            with self.assertRaises(AssertionError):
                check(Template(source))

        setattr(BrokenTemplateTest, "test_" + re.sub(r"\W+", "_", what), test)


add_tests()


class FilesBesideTest(unittest.TestCase):
    """What has to agree with the template."""

    @classmethod
    def setUpClass(cls):
        cls.sam = tomllib.loads((ROOT / "samconfig.toml").read_text())
        cls.lambda_ = tomllib.loads((ROOT / "CargoLambda.toml").read_text())
        cls.cargo = tomllib.loads((ROOT / "Cargo.toml").read_text())
        cls.template = Template(load())

    def test_samconfig_can_deploy_the_template(self):
        self.assertEqual(self.sam["version"], 0.1)
        sections = self.sam["default"]
        # The role has no name of its own, so this is enough; without it the deployment is refused.
        self.assertEqual(sections["deploy"]["parameters"]["capabilities"], "CAPABILITY_IAM")
        self.assertTrue(sections["validate"]["parameters"]["lint"])

    def test_samconfig_overrides_only_what_the_template_has(self):
        for environment, sections in self.sam.items():
            if environment == "version":
                continue
            overrides = sections.get("deploy", {}).get("parameters", {}).get("parameter_overrides", "")
            words = overrides if isinstance(overrides, list) else re.findall(r"(\S+)=", overrides)
            names = {word.partition("=")[0] for word in words}
            self.assertLessEqual(names, set(self.template.parameters), f"unknown parameters in [{environment}]")
            self.assertFalse(names & {"EffectRecovery"}, "whoever deploys decides on the recovery")

    def test_the_build_has_what_the_binary_requires(self):
        binary = self.template.source["Resources"]["Function"]["Metadata"]["BuildProperties"]["Binary"]
        [target] = [target for target in self.cargo["bin"] if target["name"] == binary]
        self.assertEqual(sorted(self.lambda_["build"]["features"]), sorted(target["required-features"]))
        self.assertTrue(self.lambda_["build"]["no_default_features"])

    def test_a_panic_stays_catchable_in_the_deployed_build(self):
        # cargo-lambda aborts on panic unless the manifest says otherwise.
        self.assertEqual(self.cargo["profile"]["release"]["panic"], "unwind")

    def test_emulators_are_pinned_and_local(self):
        compose = yaml.safe_load((ROOT / "localstack" / "compose.yaml").read_text())
        self.assertLessEqual(set(compose), {"name", "services"})
        pins = (ROOT / "localstack" / "requirements.txt").read_text()
        for name, service in compose["services"].items():
            with self.subTest(service=name):
                self.assertLessEqual(set(service), {"image", "profiles", "ports", "environment", "volumes"})
                self.assertRegex(service["image"], r"^\w+/\w+:\d+\.\d+\.\d+$")
                for port in service["ports"]:
                    self.assertRegex(port, r"^127\.0\.0\.1:\d+:\d+$", "reachable from elsewhere")
                self.assertTrue(all(isinstance(value, str) for value in service["environment"].values()))
        version = compose["services"]["ministack"]["image"].partition(":")[2]
        self.assertIn(f"ministack=={version}\n", pins, "the container and the package are different versions")
        self.assertIn("LOCALSTACK_AUTH_TOKEN", compose["services"]["localstack"]["environment"])


def main():
    suite = unittest.defaultTestLoader.loadTestsFromModule(sys.modules[__name__])
    result = unittest.TextTestRunner(stream=sys.stdout, verbosity=1).run(suite)
    failed = len(result.failures) + len(result.errors)
    print(f"template: {result.testsRun - failed} passed, {failed} failed")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
