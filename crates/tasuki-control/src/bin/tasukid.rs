//! The daemon.

use std::fs::OpenOptions;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail, ensure};
use clap::{CommandFactory, Parser};
use rustix::io::Errno;
use rustix::process::{Resource, Rlimit};
use tasuki_control::api::{gate, metrics, server};
use tasuki_control::channel;
use tasuki_control::config::{self, Config, Confine};
use tasuki_control::endpoint::socket;
use tasuki_control::housekeeping_cpus;
use tasuki_control::jail;
use tasuki_control::log;
use tasuki_control::place::{self, Place};
use tasuki_control::registry;
use tasuki_control::spawn;
use tasuki_control::successor::{self, Former};
use tasuki_control::supervisor::door::Door;
use tasuki_control::supervisor::{self, Ended, Parts, Programs, Supervisor};
use tasuki_control::watchdog;

/// Time the daemon may take until it serves, if it goes into the background.
const START_TIMEOUT: Duration = Duration::from_secs(30);

/// Exit status for a configuration that cannot be used: `EX_CONFIG` of sysexits.h. No retry helps, and the unit makes none.
const UNUSABLE: u8 = 78;

/// Starts and watches workers, and relays NICs between them. On SIGTERM or Ctrl-C it leaves its workers running;
/// `tasuki stop` ends all. On SIGHUP it applies its configuration anew, and on SIGUSR1 it opens its log anew.
#[derive(Debug, Parser)]
#[command(name = "tasukid", version, subcommand_negates_reqs = true, args_conflicts_with_subcommands = true)]
struct Arguments {
    #[command(subcommand)]
    verb: Option<Verb>,
    /// The configuration of nodes and NICs.
    #[arg(long, value_name = "FILE", required = true)]
    config: Option<PathBuf>,
    /// Runtime directory, for its sockets and its registry [default: TASUKI_DIR, or /run/tasuki; not as root
    /// $XDG_RUNTIME_DIR/tasuki].
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// The control group of version 2 that holds the nodes' groups, and no process [default: the group of tasukid
    /// itself, or where that has other processes, the root of all groups].
    #[arg(long, value_name = "DIR")]
    groups: Option<PathBuf>,
    /// Only say whether this tasukid takes the configuration. Exits with 78 if it does not, as without this option.
    #[arg(long)]
    check: bool,
    /// Stay in the terminal, and log to it. Without, the log is tasukid.log in DIR.
    #[arg(long)]
    foreground: bool,
}

#[derive(Debug, clap::Subcommand)]
enum Verb {
    /// Keep descriptors, so that they outlive tasukid and all workers. tasukid starts this.
    #[command(hide = true)]
    Keep {
        /// The runtime directory.
        folder: PathBuf,
    },
    /// Write the manual page of tasukid into a folder, for packages.
    #[command(hide = true)]
    Man {
        /// The folder, which must be there.
        folder: PathBuf,
    },
}

/// Returns the path of a program beside this one, or on the PATH.
fn program(name: &str) -> Result<PathBuf> {
    let beside = std::env::current_exe().context("the kernel does not say where this program is")?.with_file_name(name);
    if beside.is_file() {
        return Ok(beside);
    }
    let on_path = std::env::var_os("PATH").and_then(|path| {
        std::env::split_paths(&path)
            .map(|folder| folder.join(name))
            .find(|program| program.is_absolute() && program.is_file())
    });
    // The daemon reports a missing program when it starts it, and it may be there by then.
    Ok(on_path.unwrap_or(beside))
}

fn programs() -> Result<Programs> {
    Ok(Programs { worker: program("tasuki-worker")?, model: program("tasuki-sim")? })
}

/// Raises the limit of descriptors to the maximum, for this process and those that it starts: a node on a VNI has
/// some of every other.
fn open_many() {
    let limit = rustix::process::getrlimit(Resource::Nofile);
    // If that fails, the limit stays, and a process that runs out of descriptors reports it.
    let _ = rustix::process::setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
}

/// Listens for HTTP: for this user alone, or for all users; the API then serves those with a role.
fn listen(folder: &Path, is_for_others: bool) -> Result<UnixListener> {
    let path = place::api_socket(folder);
    // This daemon has the lock, so the socket there is a dead daemon's.
    let _ = std::fs::remove_file(&path);
    let listener = UnixListener::bind(&path).with_context(|| format!("{} cannot be served at", path.display()))?;
    let mode = if is_for_others { 0o666 } else { 0o600 };
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode))?;
    if is_for_others {
        let_pass(folder)?;
    }
    Ok(listener)
}

/// Lets other users pass through the directory. They see nothing else in it.
fn let_pass(folder: &Path) -> std::io::Result<()> {
    const MODE: u32 = 0o711;
    if std::fs::metadata(folder)?.mode() & 0o777 == MODE {
        return Ok(());
    }
    std::fs::set_permissions(folder, std::fs::Permissions::from_mode(MODE))
}

/// Returns a socket that gets a byte with each of these signals.
fn told_by(signals: &[i32]) -> Result<UnixStream> {
    let (told, end) = UnixStream::pair().context("the kernel has no sockets left")?;
    for &signal in signals {
        let told = told.try_clone().context("the kernel has no descriptors left")?;
        signal_hook::low_level::pipe::register(signal, told).context("the kernel took no signal handler")?;
    }
    Ok(end)
}

/// The signals to end and to apply, as they come: a byte each.
struct Signals {
    ends: UnixStream,
    hangups: UnixStream,
    /// The program before this one in this process held them back, and takes those that this one holds back.
    were_held: bool,
}

impl Signals {
    /// Takes signals from now on, and those that were held back first.
    fn take() -> Result<Self> {
        use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
        let (ends, hangups) = (told_by(&[SIGINT, SIGTERM])?, told_by(&[SIGHUP])?);
        Ok(Signals { ends, hangups, were_held: spawn::take_signals() })
    }

    /// Leaves those that nobody has handled, and those to come, to the program that this process goes on as.
    fn hand_on(&self) {
        use signal_hook::consts::{SIGHUP, SIGTERM};
        spawn::hold_signals();
        for (mut told, signal) in [(&self.ends, SIGTERM), (&self.hangups, SIGHUP)] {
            let _ = told.set_nonblocking(true);
            if told.read(&mut [0; 64]).is_ok_and(|len| len > 0) {
                // To this thread, which keeps it until it takes signals again.
                let _ = signal_hook::low_level::raise(signal);
            }
        }
    }
}

/// The reason why a configuration cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("{0:#}")]
struct Unusable(anyhow::Error);

/// Reads the configuration, and checks that it can hold on this machine. Returns it with its text, or [`Unusable`].
fn read(file: &Path) -> Result<(Config, String)> {
    let read = || {
        let text = Config::text(file)?;
        let config = Config::parse(file, &text)?;
        let usable = housekeeping_cpus::usable();
        if let Some(stray) = config::stray_cpu(&config, |cpu| usable.contains(&cpu)) {
            bail!("{}: {stray}", file.display());
        }
        can_confine(file, &config)?;
        Ok((config, text))
    };
    // A lack of descriptors is not the file's.
    read().map_err(|error: anyhow::Error| if lacks_descriptors(&error) { error } else { Unusable(error).into() })
}

/// Checks that this user can confine workers as the configuration says.
fn can_confine(file: &Path, config: &Config) -> Result<()> {
    let is_root = rustix::process::geteuid().is_root();
    ensure!(
        is_root || config.daemon.confine != Confine::Strict,
        "{}: only root can confine workers as they are to be; start tasukid as root, or write confine = \"best-effort\" under [daemon]: tasuki status then lists the missing restrictions",
        file.display()
    );
    Ok(())
}

/// Returns what to begin with: the file, or what was applied last if that can still be had and the file cannot be used.
/// Workers may drive by that, and a file with a mistake is no reason to leave them alone; nor is a CPU or a user that this
/// machine does not have any more, and that both name.
fn read_or_go_on(file: &Path, folder: &Path) -> Result<(Config, Result<String, String>)> {
    read(file).map(|(config, text)| (config, Ok(text))).or_else(|error| {
        // Workers may drive: that is tried again.
        let also =
            |why: &dyn std::fmt::Display| anyhow!("{error:#}; nor can tasukid go by what was applied last: {why}");
        let Some(config) = supervisor::applied_last(folder).map_err(|why| also(&why))? else { return Err(error) };
        can_confine(file, &config).map_err(|why| also(&why))?;
        Ok((config, Err(sentence(&error))))
    })
}

/// A program that is to go on.
struct Next {
    with: PathBuf,
    takes_signals: bool,
    /// What it gets in case that the keeper dies.
    handed_on: Option<OwnedFd>,
}

/// Serves until the loop ends. Returns the program that is to go on, if any. If it fails to begin, `former` is left.
fn serve(
    file: &Path,
    folder: &Path,
    groups: Option<PathBuf>,
    former: &mut Option<Former>,
    signals: &mut Option<Signals>,
) -> Result<Option<Next>> {
    // First: by default that signal ends a process.
    log::rotate_when(told_by(&[signal_hook::consts::SIGUSR1])?).context("the kernel has no thread left")?;
    successor::reap();
    rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o077));
    // It may be a pipe, which can be read once.
    let read_now = if folder.join(registry::FILE).exists() { None } else { Some(read(file)?) };
    let programs = programs()?;
    open_many();
    let place = Place::take(folder)?;
    let is_used = read_now.is_none();
    let (config, text) = match read_now {
        Some((config, text)) => (config, Ok(text)),
        None => read_or_go_on(file, place.folder())?,
    };
    let file = &std::path::absolute(file)?;
    let listens = |config: &Config| config.daemon.metrics.map(metrics::listen).transpose();
    // Where none was at work before, the file is in force.
    let mut open = if is_used { None } else { listens(&config)? };
    let (folder, held) = (place.folder().to_owned(), place.clone());
    // Until now SIGTERM ends this process, also while a file keeps it waiting, unless it goes on for a program that held that back.
    let signals = signals.insert(Signals::take()?);
    let told = |signals: &UnixStream| signals.try_clone().context("the kernel has no descriptors left");
    let (signals, hangups) = (told(&signals.ends)?, told(&signals.hangups)?);
    let (sender, requests) = std::sync::mpsc::channel();
    let door = Door::new(sender).context("the kernel has no eventfd left")?;
    let cpus = housekeeping_cpus::find(&Config::default());
    let mut supervisor = Supervisor::begin(Parts {
        config,
        file: (file.clone(), text),
        programs,
        place,
        groups,
        door: door.clone(),
        requests,
        signals,
        hangups,
        not_replaced: successor::not_replaced(),
        handed_on: former.as_mut().and_then(Former::handed_on),
    })?;
    // What was applied last may be in force, and not the file.
    let roles = supervisor.config().api.clone();
    if is_used {
        // Workers may drive, and the counts are no reason to leave them alone. After an upgrade, the former program would find
        // the same address taken.
        match listens(supervisor.config()) {
            Ok(opened) => open = opened,
            Err(error) => supervisor.is_not_scraped(format!("{error:#}; then start tasukid anew (tasuki upgrade)")),
        }
    }
    let is_for_others = roles.are_given();
    let listener = listen(&folder, is_for_others)?;
    let (path, of_socket, watched) = (place::api_socket(&folder), folder.clone(), held.clone());
    let mut served = socket::mark(&path);
    let mut is_told = false;
    let again = move || {
        if socket::mark(&path) == served {
            // systemd sets the mode anew (RuntimeDirectoryMode=) for each process of the service, that of a reload included.
            let _ = is_for_others.then(|| let_pass(&of_socket));
            return None;
        }
        // In a directory that was deleted, another daemon may have begun since.
        if !watched.is_ours() {
            if !std::mem::replace(&mut is_told, true) {
                tracing::warn!(
                    "{} is another tasukid's by now: this one is asked again when that has ended",
                    of_socket.display()
                );
            }
            return None;
        }
        let made = listen(&of_socket, is_for_others).ok()?;
        served = socket::mark(&path);
        tracing::info!("the socket {} was deleted, and is there anew", path.display());
        Some(made)
    };
    let (over, is_over) = tokio::sync::oneshot::channel::<Duration>();
    let begun = server::begin(listener, open).context("it cannot serve callers")?;
    let http = std::thread::Builder::new().name("http".to_owned()).spawn(move || {
        let over = async { is_over.await.unwrap_or(gate::LAST_ANSWERS_TIMEOUT) };
        server::serve(begun, again, roles, door, cpus, over);
    });
    let http = http.context("the kernel has no thread left")?;
    watchdog::tell_that_it_serves();
    former.take().into_iter().for_each(Former::forget);
    tracing::info!("tasukid serves at {}", place::api_socket(&folder).display());
    let ended = supervisor.run();
    let is_replaced = matches!(ended, Ok(Ended::Replaced { .. }));
    if !is_replaced {
        watchdog::tell(watchdog::STOPPING);
    }
    // The answer to the upgrade is on its way. A caller that reads nothing keeps no worker unwatched.
    let for_answers = if is_replaced { gate::LAST_ANSWERS_TIMEOUT_REPLACED } else { gate::LAST_ANSWERS_TIMEOUT };
    let _ = over.send(for_answers);
    let needs_no_keeper = matches!(ended, Ok(Ended::Replaced { needs_no_keeper: true, .. }));
    let handed_on = needs_no_keeper.then(|| supervisor.hand_on()).flatten();
    // Callers that wait for an answer see that none will come.
    drop(supervisor);
    let _ = http.join();
    let removes = |path: PathBuf| held.is_ours().then(|| std::fs::remove_file(path));
    removes(place::api_socket(&folder));
    match ended? {
        Ended::Alone => {}
        Ended::Replaced { with, takes_signals, .. } => return Ok(Some(Next { with, takes_signals, handed_on })),
        Ended::Everything => {
            removes(folder.join(registry::FILE));
            tracing::info!("all has ended");
        }
    }
    Ok(None)
}

/// Refuses what can be read once only, as a pipe, or what is another file for the program in the background: that reads it
/// again.
fn can_be_read_again(file: &Path) -> Result<()> {
    let is_of_process = ["/dev/stdin", "/dev/fd", "/proc"].iter().any(|folder| file.starts_with(folder));
    if is_of_process || file.metadata().is_ok_and(|file| !file.is_file() && !file.is_dir()) {
        return Err(Unusable(anyhow::anyhow!(
            "the configuration {} may be read once only, and tasukid in the background reads it again; name a file, or add --foreground",
            file.display()
        ))
        .into());
    }
    Ok(())
}

/// Starts this program anew in the background, and waits until that serves.
fn go_into_background(folder: &Path) -> Result<()> {
    let log_path = folder.join("tasukid.log");
    // The caller has checked the configuration, and the directory is made here, while errors still reach the
    // terminal.
    drop(Place::take(folder)?);
    let log = OpenOptions::new().append(true).create(true).mode(0o600).open(&log_path);
    let log = log.with_context(|| format!("{} cannot be written to", log_path.display()))?;
    let begins_at = log.metadata().map_or(0, |meta| meta.len());
    // One for each caller: several may start at once, and one of them gets the directory.
    let notices = folder.join(format!("begun-{}.sock", std::process::id()));
    let _ = std::fs::remove_file(&notices);
    let begun = UnixDatagram::bind(&notices).with_context(|| format!("{} cannot be listened at", notices.display()))?;
    begun.set_read_timeout(Some(Duration::from_millis(50)))?;
    let mut command = Command::new(std::env::current_exe()?);
    command.args(std::env::args_os().skip(1)).arg("--foreground").env("NOTIFY_SOCKET", &notices);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::from(log));
    std::os::unix::process::CommandExt::process_group(&mut command, 0);
    let mut child = command.spawn().context("tasukid does not start a second time")?;
    let until = std::time::Instant::now() + START_TIMEOUT;
    let outcome = loop {
        let mut notice = [0; 4096];
        if let Ok(len) = begun.recv(&mut notice) {
            let notice = String::from_utf8_lossy(&notice[..len]);
            break match notice.lines().find_map(|line| line.strip_prefix("STATUS=")) {
                Some(why) => Err(anyhow::anyhow!("{why}")),
                None => Ok(()),
            };
        }
        if child.try_wait()?.is_some() {
            let log = std::fs::read(&log_path).unwrap_or_default();
            let said = String::from_utf8_lossy(log.get(usize::try_from(begins_at)?..).unwrap_or_default()).into_owned();
            let last = said.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or("it did not say why");
            break Err(anyhow::anyhow!("{}", last.strip_prefix("tasukid: ").unwrap_or(last)));
        }
        if std::time::Instant::now() > until {
            if place::holder(folder) != Some(child.id()) {
                let _ = child.kill();
            }
            break Err(anyhow::anyhow!(
                "tasukid did not begin to serve within {} s; {} says why",
                START_TIMEOUT.as_secs(),
                log_path.display()
            ));
        }
    };
    let _ = std::fs::remove_file(&notices);
    outcome.inspect(|()| {
        let (named, child) = (folder.display(), child.id());
        let sentence = format!("tasukid is at work in {named} (process {child}); its log is {}", log_path.display());
        let _ = writeln!(std::io::stdout(), "{sentence}");
    })
}

fn main() -> ExitCode {
    let words: Vec<_> = std::env::args_os().take(4).collect();
    if let [_, word, terms] = &words[..]
        && word == jail::WORD
    {
        return jail::run(&terms.to_string_lossy());
    }
    let arguments = Arguments::parse();
    match &arguments.verb {
        None => {}
        Some(Verb::Keep { folder }) => {
            return exit_code(tasuki_control::keeper::run(folder));
        }
        Some(Verb::Man { folder }) => {
            let written = clap_mangen::generate_to(Arguments::command(), folder);
            return exit_code(written.with_context(|| format!("the page cannot be written to {}", folder.display())));
        }
    }
    let file = arguments.config.clone().unwrap_or_default();
    let stays = arguments.foreground || std::env::var_os("NOTIFY_SOCKET").is_some();
    let folder = arguments.dir.clone().unwrap_or_else(place::usual);
    if arguments.check {
        let took = read(&file).and_then(|(config, _)| {
            let Programs { worker, model } = programs()?;
            let worker = config.daemon.worker.clone().unwrap_or(worker);
            let needs_model = config.nic.iter().any(|nic| nic.device == config::Device::Sim);
            for program in [Some(&worker), Some(&model).filter(|_| needs_model)].into_iter().flatten() {
                if let Some(why) = spawn::not_startable(program) {
                    bail!("{} {why}", program.display());
                }
            }
            let _ = writeln!(std::io::stdout(), "{}", successor::line(&file));
            Ok(())
        });
        return exit_code(took);
    }
    log::begin();
    exit_code(if stays {
        let (mut former, mut signals) = (Former::find(), None);
        // A panic, which has been reported by then, is one more way not to begin.
        let served =
            catch_unwind(AssertUnwindSafe(|| serve(&file, &folder, arguments.groups, &mut former, &mut signals)));
        let hand_on = |takes: bool| signals.iter().filter(|_| takes).for_each(Signals::hand_on);
        let error = match served {
            Ok(Ok(None)) => Ok(()),
            Ok(Ok(Some(Next { with, takes_signals, handed_on }))) => {
                hand_on(takes_signals);
                Err(successor::become_it(&with, handed_on)).context("tasukid does not go on")
            }
            Ok(Err(error)) => Err(error),
            Err(_) => Err(anyhow!("it has panicked")),
        };
        match (error, former) {
            (Err(error), Some(former)) => {
                hand_on(signals.as_ref().is_some_and(|signals| signals.were_held));
                Err(former.again(&format!("{error:#}"))).context("tasukid does not go on")
            }
            (error, _) => error,
        }
    } else {
        can_be_read_again(&file).and_then(|()| read(&file)).and_then(|_| go_into_background(&folder))
    })
}

fn exit_code(done: Result<()>) -> ExitCode {
    let code = match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let sentence = sentence(&error);
            // Its log may be where nothing can be written any more.
            watchdog::tell(&format!("STATUS={sentence}"));
            log::say(&format!("tasukid: {sentence}"));
            if error.is::<Unusable>() { ExitCode::from(UNUSABLE) } else { ExitCode::FAILURE }
        }
    };
    log::finish();
    code
}

fn lacks_descriptors(error: &anyhow::Error) -> bool {
    error.chain().any(|cause| {
        let of_kernel = cause.downcast_ref::<Errno>().is_some_and(|errno| channel::lacks(&(*errno).into()));
        of_kernel || cause.downcast_ref().is_some_and(channel::lacks)
    })
}

/// Returns an error in words. A limit on descriptors can strike at any step: the remedy is the same for all.
fn sentence(error: &anyhow::Error) -> String {
    const LIMIT: &str = "LimitNOFILE=";
    let said = format!("{error:#}");
    if said.contains(LIMIT) || !lacks_descriptors(error) {
        return said;
    }
    format!("{said}; raise {LIMIT} of tasukid (ulimit -Hn)")
}
