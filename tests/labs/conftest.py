"""What all tests of the labs share."""

import sys

# jsonschema would load a grammar for addresses in every script, for seconds, when nbgrader is imported; no notebook has such.
sys.modules.setdefault("rfc3987_syntax", None)
