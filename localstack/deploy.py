#!/usr/bin/env python3
"""Deploys template.yaml and a built function to a local AWS emulator.

    AWS_ENDPOINT_URL=http://127.0.0.1:4566 localstack/deploy.py \
        --bootstrap target/debug/consumer \
        --parameter EffectUrl=http://127.0.0.1:8080/ --parameter EffectRecovery=rerun

Prints the stack's outputs as JSON. It does what `sam package` and `sam deploy` do, with
nothing but the endpoint to tell it which emulator. To deploy to AWS use `sam deploy`.
"""

import argparse
import hashlib
import io
import json
import logging
import os
import platform
import stat
import sys
import time
import zipfile
from pathlib import Path

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, WaiterError
from samtranslator.public.exceptions import InvalidDocumentException
from samtranslator.translator.transform import transform
from samtranslator.yaml_helper import yaml_parse

# The translator warns at exit about usage metrics that it did not publish.
logging.getLogger("samtranslator.metrics.metrics").setLevel(logging.ERROR)

TEMPLATE = Path(__file__).resolve().parent.parent / "template.yaml"
REGION = "us-east-1"


class DeployError(Exception):
    """What went wrong and what to do about it."""


class NoManagedPolicies:
    """The template names no managed policies, so the account's list is not needed."""

    def load(self):
        return {}


def expand(template, bucket="code", key="consumer.zip", architecture=None):
    """The plain CloudFormation that SAM makes of a parsed template."""
    # The translator asks boto3 for the region to name the partition.
    os.environ.setdefault("AWS_DEFAULT_REGION", REGION)
    for resource in template["Resources"].values():
        if resource["Type"] == "AWS::Serverless::Function":
            resource["Properties"]["CodeUri"] = {"Bucket": bucket, "Key": key}
            # What `sam build` reads; CloudFormation has no use for it.
            resource.pop("Metadata", None)
            if architecture:
                resource["Properties"]["Architectures"] = [architecture]
    try:
        return transform(template, {}, NoManagedPolicies())
    except InvalidDocumentException as error:
        causes = "\n  ".join(cause.message for cause in error.causes)
        raise DeployError(f"SAM does not accept the template:\n  {causes}") from error


def package(bootstrap):
    """The deployment package: the binary as an executable named bootstrap."""
    if not bootstrap.is_file():
        raise DeployError(f"no function at {bootstrap}: build it first (cargo build --features http,sqs --bin consumer)")
    entry = zipfile.ZipInfo("bootstrap", date_time=(1980, 1, 1, 0, 0, 0))
    entry.compress_type = zipfile.ZIP_DEFLATED
    entry.external_attr = (stat.S_IFREG | 0o755) << 16
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compresslevel=1) as archive:
        archive.writestr(entry, bootstrap.read_bytes())
    return buffer.getvalue()


def client(service):
    """A client for the emulator; any credentials will do."""
    endpoint = os.environ.get("AWS_ENDPOINT_URL")
    if not endpoint:
        raise DeployError(
            "AWS_ENDPOINT_URL is not set: set it to the emulator, e.g. http://127.0.0.1:4566 "
            "(to deploy to AWS use `sam deploy`)"
        )
    return boto3.client(
        service,
        endpoint_url=endpoint,
        region_name=os.environ.get("AWS_DEFAULT_REGION", REGION),
        aws_access_key_id=os.environ.get("AWS_ACCESS_KEY_ID", "test"),
        aws_secret_access_key=os.environ.get("AWS_SECRET_ACCESS_KEY", "test"),
        config=Config(s3={"addressing_style": "path"}, retries={"mode": "standard"}),
    )


def deploy(bootstrap, parameters, stack="idempotent-consumer", bucket="idempotent-consumer-code", architecture=None):
    """Creates or updates the stack and returns its outputs."""
    code = package(bootstrap)
    # Named by content, so that new code is seen as a change.
    key = f"{hashlib.sha256(code).hexdigest()}.zip"
    if architecture is None:
        architecture = "arm64" if platform.machine() in ("arm64", "aarch64") else "x86_64"
    template = expand(yaml_parse(TEMPLATE.read_text()), bucket, key, architecture)

    s3 = client("s3")
    try:
        s3.create_bucket(Bucket=bucket)
    except ClientError as error:
        if error.response["Error"]["Code"] not in ("BucketAlreadyOwnedByYou", "BucketAlreadyExists"):
            raise
    s3.put_object(Bucket=bucket, Key=key, Body=code)

    cloudformation = client("cloudformation")
    change_set = f"deploy-{time.time_ns()}"
    create = not exists(cloudformation, stack)
    cloudformation.create_change_set(
        StackName=stack,
        ChangeSetName=change_set,
        ChangeSetType="CREATE" if create else "UPDATE",
        TemplateBody=json.dumps(template),
        Parameters=[{"ParameterKey": name, "ParameterValue": str(value)} for name, value in parameters.items()],
        Capabilities=["CAPABILITY_IAM"],
    )
    try:
        cloudformation.get_waiter("change_set_create_complete").wait(
            StackName=stack, ChangeSetName=change_set, WaiterConfig={"Delay": 1, "MaxAttempts": 60}
        )
    except WaiterError as error:
        reason = error.last_response.get("StatusReason", "") or str(error)
        if "didn't contain changes" in reason or "No updates" in reason:
            return outputs(cloudformation, stack)
        raise DeployError(f"the change set was refused: {reason}") from error
    cloudformation.execute_change_set(StackName=stack, ChangeSetName=change_set)
    waiter = cloudformation.get_waiter("stack_create_complete" if create else "stack_update_complete")
    try:
        waiter.wait(StackName=stack, WaiterConfig={"Delay": 1, "MaxAttempts": 120})
    except WaiterError as error:
        raise DeployError("the stack was not deployed:\n  " + "\n  ".join(failures(cloudformation, stack))) from error
    return outputs(cloudformation, stack)


def exists(cloudformation, stack):
    try:
        found = cloudformation.describe_stacks(StackName=stack)["Stacks"]
    except ClientError:
        return False
    # A change set that was refused leaves an empty stack behind, still to be created.
    return bool(found) and found[0]["StackStatus"] != "REVIEW_IN_PROGRESS"


def outputs(cloudformation, stack):
    description = cloudformation.describe_stacks(StackName=stack)["Stacks"][0]
    return {output["OutputKey"]: output["OutputValue"] for output in description.get("Outputs", [])}


def failures(cloudformation, stack):
    events = cloudformation.describe_stack_events(StackName=stack)["StackEvents"]
    return [
        f"{event['LogicalResourceId']}: {event.get('ResourceStatusReason', event['ResourceStatus'])}"
        for event in events
        if event["ResourceStatus"].endswith("FAILED")
    ] or ["no resource reports a failure; see the emulator's log"]


def parameter(text):
    name, separator, value = text.partition("=")
    if not separator:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bootstrap", type=Path, required=True, help="the built function for the emulator's machine")
    parser.add_argument("--parameter", type=parameter, action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--stack", default="idempotent-consumer")
    parser.add_argument("--architecture", choices=["arm64", "x86_64"], help="default: that of this machine")
    arguments = parser.parse_args()
    try:
        result = deploy(
            arguments.bootstrap, dict(arguments.parameter), arguments.stack, architecture=arguments.architecture
        )
    except (DeployError, ClientError, BotoCoreError) as error:
        sys.exit(f"deploy: {error}")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
