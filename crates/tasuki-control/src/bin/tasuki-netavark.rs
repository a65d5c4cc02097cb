//! netavark's plugin: by it podman, from 4.4 on, puts containers onto VNIs. docs/users/containers.md says how.

use std::process::ExitCode;

fn main() -> ExitCode {
    tasuki_control::netavark::main()
}
