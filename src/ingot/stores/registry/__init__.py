"""Registries of OCI artifacts: ``oci://host/name:tag``. Definition: ``spec/registries.md``."""
