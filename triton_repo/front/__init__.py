"""The front of the Triton server: a process that clients talk to, and that lets only well-formed requests through to Triton."""
