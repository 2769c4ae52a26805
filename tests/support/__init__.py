"""Helpers of the tests: references of kernels, files built by hand, servers, and inputs. No part of the wheel."""
