//! The command line. It drives nothing itself: it asks the daemon, or becomes the program that does.

use std::convert::Infallible;
use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};

use anyhow::{Context, Result, ensure};
use clap::{CommandFactory, Parser, Subcommand};
use tasuki_control::cli::capture::Capture;
use tasuki_control::cli::config::Configs;
use tasuki_control::cli::top::Top;
use tasuki_control::cli::up::Up;
use tasuki_control::cli::upgrade::Everything;
use tasuki_control::cli::vm::Run;
use tasuki_control::cli::{self, Asked, Configuration, Give, Nodes, Reach, Standby, Vnis, Workers};
use tasuki_control::log;

/// Network cards that change hands while packets flow.
#[derive(Debug, Parser)]
#[command(name = "tasuki", version)]
struct Arguments {
    #[command(flatten)]
    reach: Reach,
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    /// Bring up the nodes and NICs of a configuration, with a tasukid if none runs, and wait until they are at work.
    Up(Up),
    /// Show the daemon, nodes and NICs at once.
    Status,
    /// Nodes: systems that own NICs, or are on a VNI.
    #[command(subcommand)]
    Node(Nodes),
    /// VNIs: Ethernet between nodes, through memory.
    #[command(subcommand)]
    Vni(Vnis),
    /// Workers: the processes that drive NICs.
    #[command(subcommand)]
    Worker(Workers),
    /// Network cards: the daemon's, or one without the daemon.
    #[command(subcommand)]
    Nic(NicCommand),
    /// Virtual machines of nodes.
    #[command(subcommand)]
    Vm(VmCommand),
    /// Capture the frames of a node or a NIC, as pcapng: for Wireshark, tcpdump, or a file.
    Capture(Capture),
    /// Watch nodes, NICs, rates, drops and events as they come. With --json, write each look as a line: a recording.
    Top(Top),
    /// Show the events, oldest first.
    Events {
        /// Only events after this number.
        #[arg(long, default_value_t = 0, value_name = "NUMBER")]
        since: u64,
        /// Go on with those that come, also after tasukid was started anew.
        #[arg(long, short)]
        follow: bool,
    },
    /// The configuration: as it is now, and its JSON Schema.
    #[command(subcommand)]
    Config(Configs),
    /// Show the steps that `tasuki apply` would take, and take none.
    Plan(Configuration),
    /// Make nodes and NICs those of a configuration, step by step, while the others go on. Nodes that were added by hand
    /// stay, and NICs that were given away by hand go back.
    Apply(Configuration),
    /// Replace tasukid and the workers of all nodes, one after the other, while packets flow. Stops at the first trouble.
    Upgrade(Everything),
    /// Look at this machine: what Tasuki can do here, and what to do about the rest. Exits with 1 if tasukid cannot work.
    Doctor,
    /// Print a script that completes this command's words in a shell.
    Completions {
        /// The shell that is to read it.
        shell: clap_complete::Shell,
    },
    /// Write the manual pages of tasuki into a folder, for packages.
    #[command(hide = true)]
    Man {
        /// The folder, which must be there.
        folder: std::path::PathBuf,
    },
    /// End all workers, park their NICs, and end the daemon.
    #[command(visible_alias = "down")]
    Stop,
    /// Run a model of a network card, as a vfio-user device.
    #[command(disable_help_flag = true)]
    Sim {
        #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "nic …")]
        words: Vec<OsString>,
    },
}

#[derive(Debug, Subcommand)]
enum VmCommand {
    /// Start a node's virtual machine by QEMU, with the options that it needs (docs/users/connect-a-virtual-machine.md).
    Run(Run),
}

#[derive(Debug, Subcommand)]
enum NicCommand {
    /// List all NICs: the node of each, and how long no worker drove it when it last changed hands.
    List,
    /// Give a NIC to another node while packets flow.
    Give(Give),
    /// Name the node that gets a NIC if the node that has it is lost.
    Standby(Standby),
    /// Show the counters of a NIC's driver.
    Counts {
        /// Name of the NIC.
        nic: String,
    },
    /// Identify a card, without the daemon.
    #[command(disable_help_flag = true)]
    Probe {
        #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "DEVICE")]
        words: Vec<OsString>,
    },
    /// Send and receive frames by a card, without the daemon.
    #[command(disable_help_flag = true)]
    Run {
        #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "DEVICE …")]
        words: Vec<OsString>,
    },
}

/// Becomes `program`, which lies beside this one.
fn become_program(program: &str, words: Vec<OsString>) -> Result<Infallible> {
    let path =
        std::env::current_exe().context("the kernel does not say where this program is")?.with_file_name(program);
    ensure!(path.exists(), "there is no {}; build it: cargo build --package {program}", path.display());
    let error = Command::new(&path).args(words).exec();
    Err(error).with_context(|| format!("{} does not start", path.display()))
}

fn nic(verb: &str, words: Vec<OsString>) -> Result<()> {
    let first = ["nic", verb].into_iter().map(OsString::from);
    become_program("tasuki-worker", first.chain(words).collect()).map(|never| match never {})
}

fn main() -> ExitCode {
    let Arguments { reach, what } = Arguments::parse();
    let ask = |asked| cli::run(&reach, &asked);
    let done = match what {
        What::Up(up) => cli::up::up(&reach, &up),
        What::Status => ask(Asked::Status),
        What::Node(nodes) => ask(Asked::Nodes(nodes)),
        What::Vni(vnis) => ask(Asked::Vnis(vnis)),
        What::Worker(workers) => ask(Asked::Workers(workers)),
        What::Nic(NicCommand::List) => ask(Asked::NicList),
        What::Nic(NicCommand::Give(give)) => ask(Asked::Give(give)),
        What::Nic(NicCommand::Standby(standby)) => ask(Asked::Standby(standby)),
        What::Nic(NicCommand::Counts { nic }) => ask(Asked::Counts(nic)),
        What::Nic(NicCommand::Probe { words }) => nic("probe", words),
        What::Nic(NicCommand::Run { words }) => nic("run", words),
        What::Vm(VmCommand::Run(run)) => cli::vm::run(&reach, &run),
        What::Capture(capture) => cli::capture::run(&reach, &capture),
        What::Events { since, follow } => ask(Asked::Events { since, follow }),
        What::Top(top) => cli::top::run(&reach, &top),
        What::Plan(configuration) => ask(Asked::Plan(configuration)),
        What::Apply(configuration) => ask(Asked::Apply(configuration)),
        What::Upgrade(everything) => cli::upgrade::run(&reach, &everything),
        What::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Arguments::command(), "tasuki", &mut script);
            cli::print(&script)
        }
        What::Man { folder } => clap_mangen::generate_to(Arguments::command(), &folder)
            .with_context(|| format!("the pages cannot be written to {}", folder.display())),
        What::Config(configs) => cli::config::run(&reach, &configs),
        What::Doctor => cli::doctor::run(&reach),
        What::Stop => ask(Asked::Stop),
        What::Sim { words } => become_program("tasuki-sim", [OsString::from("sim")].into_iter().chain(words).collect())
            .map(|never| match never {}),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            log::say(&format!("tasuki: {error:#}"));
            ExitCode::FAILURE
        }
    }
}
