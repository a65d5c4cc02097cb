//! The plugin by which a container's runtime puts containers onto VNIs (CNI). docs/users/containers.md says how.

use std::process::ExitCode;

fn main() -> ExitCode {
    tasuki_control::cni::main()
}
