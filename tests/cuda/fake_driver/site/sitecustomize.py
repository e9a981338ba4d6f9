"""Python imports this module when it starts: processes of a test get the fake driver."""

import json
import os

if settings := os.environ.get("MINIDL_TEST_CUDA"):
    from fake_driver import replace_library

    replace_library(json.loads(settings))
