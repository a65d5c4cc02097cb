//! The stock worker; see the library.

use std::process::ExitCode;

fn main() -> ExitCode {
    tasuki_worker::stock()
}
