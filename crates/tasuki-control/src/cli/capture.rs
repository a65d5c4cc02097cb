//! `tasuki capture`: frames of a node or a NIC as pcapng, into a file or a pipe.

use std::fs::{File, OpenOptions, Permissions};
use std::io::{ErrorKind, IsTerminal, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use http_body_util::BodyExt;
use hyper::Method as Verb;
use signal_hook::consts::{SIGINT, SIGTERM};

use super::{Reach, part, show};
use crate::api::types::Status;
use crate::api::{client, pcapng};
use crate::{log, place};

/// The subject of a capture, and its output.
#[derive(Debug, Args)]
pub struct Capture {
    /// A node, all of whose ports are captured, or a NIC.
    pub name: String,
    /// Write to this file; without, or with -, to standard output, for a pipe.
    #[arg(short, long, value_name = "FILE")]
    pub write: Option<PathBuf>,
    /// End after this many frames; by default at ^C.
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub count: Option<u64>,
    /// Keep at most this many bytes of each frame.
    #[arg(long, value_name = "BYTES", value_parser = clap::value_parser!(u32).range(14..))]
    pub snap: Option<u32>,
    /// Capture the NIC of that name, even if a node has it, too.
    #[arg(long)]
    pub nic: bool,
}

/// Passes whole blocks on, and counts frames and missed frames in them.
struct Passage {
    out: File,
    /// The file that it is, if it is not standard output.
    file: Option<PathBuf>,
    /// Bytes passed on.
    passed: u64,
    unfinished: Vec<u8>,
    frames: u64,
    missed: Option<u64>,
}

impl Passage {
    fn pass(&mut self, bytes: &[u8]) -> Result<()> {
        self.unfinished.extend_from_slice(bytes);
        let (mut at, frames) = (0, self.frames);
        while let Some((kind, len)) = pcapng::whole_block(&self.unfinished[at..])? {
            match kind {
                pcapng::PACKET => self.frames += 1,
                pcapng::STATISTICS => {
                    let missed = pcapng::missed(&self.unfinished[at..at + len]).unwrap_or(0);
                    self.missed = Some(self.missed.unwrap_or(0).saturating_add(missed));
                }
                _ => {}
            }
            at += len;
        }
        if let Err(error) = self.out.write_all(&self.unfinished[..at]) {
            self.frames = frames;
            return Err(self.is_full(error));
        }
        self.passed += at as u64;
        self.unfinished.drain(..at);
        Ok(())
    }

    fn is_full(&self, error: std::io::Error) -> anyhow::Error {
        if error.kind() == ErrorKind::BrokenPipe {
            return error.into();
        }
        // A part of a block would spoil the file for its readers. Best effort: a device has no length.
        let _ = self.file.as_ref().map(|_| self.out.set_len(self.passed));
        let to = self.file.as_ref().map_or_else(|| "standard output".to_owned(), |file| file.display().to_string());
        let frames = self.frames;
        anyhow::Error::new(error).context(format!(
            "{to} takes no more, and keeps the first {frames} frames; write to where there is room (-w), or keep less of each (--snap 128)"
        ))
    }

    fn sentence(&self) -> String {
        let frames = match self.frames {
            1 => "1 frame was captured".to_owned(),
            frames => format!("{frames} frames were captured"),
        };
        match self.missed {
            None => format!("{frames}; how many were missed is not known"),
            Some(0) => format!("{frames}, and none missed"),
            Some(missed) => format!(
                "{frames}, and {missed} missed, since the reader was too slow; write to a file (-w), or keep less of each (--snap 128)"
            ),
        }
    }
}

/// Returns the HTTP path for the request.
fn address(folder: &Path, capture: &Capture) -> Result<String> {
    let Capture { name, count, snap, nic, .. } = capture;
    let status: Status = show::read(client::ask(folder, Verb::GET, "/v1/status", None)?)?;
    let is_node = status.nodes.iter().any(|node| node.name == *name);
    let is_nic = status.nics.iter().any(|other| other.name == *name);
    let nodes = status.nodes.iter().map(|node| &node.name).filter(|_| !nic);
    let names = nodes.chain(status.nics.iter().map(|nic| &nic.name));
    let names = names.map(String::as_str).collect::<Vec<_>>().join(", ");
    let kind = match (is_node && !nic, is_nic) {
        (true, _) => "nodes",
        (false, true) => "nics",
        (false, false) => {
            bail!("there is no {}NIC {name:?}; there are: {names}", if *nic { "" } else { "node and no " })
        }
    };
    let words = [snap.map(|snap| format!("snap={snap}")), count.map(|count| format!("count={count}"))];
    let words: Vec<String> = words.into_iter().flatten().collect();
    Ok(format!("/v1/{kind}/{}/capture?{}", part(name), words.join("&")))
}

/// Opens the output.
fn output(write: Option<&Path>) -> Result<File> {
    match write.filter(|path| *path != Path::new("-")) {
        Some(path) => {
            let cannot = || format!("{} cannot be written", path.display());
            let file = OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(path);
            let file = file.with_context(cannot)?;
            // Only the file's user may read captured frames, even if the file existed before. A pipe or a device
            // stays as it is.
            if file.metadata().with_context(cannot)?.is_file() {
                file.set_permissions(Permissions::from_mode(0o600)).with_context(|| {
                    format!("{} cannot be made its user's alone to read; name another file", path.display())
                })?;
                file.set_len(0).with_context(cannot)?;
            }
            Ok(file)
        }
        None => Ok(File::from(std::io::stdout().as_fd().try_clone_to_owned().context("there is no standard output")?)),
    }
}

/// Returns a socket that a first signal makes readable. The second signal ends this program.
fn interruptions() -> Result<tokio::net::UnixStream> {
    let (told, hears) = std::os::unix::net::UnixStream::pair().context("the kernel has no sockets left")?;
    for signal in [SIGINT, SIGTERM] {
        let was_told = Arc::new(AtomicBool::new(false));
        signal_hook::flag::register_conditional_default(signal, was_told.clone())?;
        signal_hook::flag::register(signal, was_told)?;
        signal_hook::low_level::pipe::register(signal, told.try_clone()?)?;
    }
    hears.set_nonblocking(true)?;
    Ok(tokio::net::UnixStream::from_std(hears)?)
}

/// Captures until the end.
pub fn run(reach: &Reach, capture: &Capture) -> Result<()> {
    let folder = reach.dir.clone().unwrap_or_else(place::asked);
    let is_piped = capture.write.as_deref().is_none_or(|path| path == Path::new("-"));
    ensure!(
        !is_piped || !std::io::stdout().is_terminal(),
        "a terminal cannot show a capture; write it to a file (-w {0}.pcapng), or pipe it: tasuki capture {0} | tcpdump -r -",
        capture.name
    );
    let address = address(&folder, capture)?;
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_io().build().context("the kernel has no room")?;
    let ended = runtime.block_on(async {
        let interruptions = interruptions()?;
        let answer = client::open(&folder, Verb::GET, &address, None).await?;
        let number = answer.headers().get(client::CAPTURE).and_then(|value| value.to_str().ok()).map(str::to_owned);
        let number = number.context("tasukid does not say which capture this is; rebuild the older of the two")?;
        let out = output(capture.write.as_deref())?;
        let how = if capture.count.is_some() { "" } else { "; ^C ends it" };
        log::say(&format!("tasuki: capturing {}{how}", capture.name));
        let file = capture.write.clone().filter(|_| !is_piped);
        let mut passage = Passage { out, file, passed: 0, unfinished: Vec::new(), frames: 0, missed: None };
        let passed = pass(&folder, &number, answer.into_body(), interruptions, &mut passage).await;
        Ok::<_, anyhow::Error>(passed.map(|()| passage.sentence()))
    })?;
    match ended {
        Ok(sentence) => log::say(&format!("tasuki: {sentence}")),
        // The reader of the pipe has seen enough.
        Err(error) if is_closed(&error) => {}
        Err(error) => return Err(error),
    }
    Ok(())
}

fn is_closed(error: &anyhow::Error) -> bool {
    error.downcast_ref::<std::io::Error>().is_some_and(|error| error.kind() == ErrorKind::BrokenPipe)
}

async fn pass(
    folder: &Path,
    number: &str,
    mut body: hyper::body::Incoming,
    interruptions: tokio::net::UnixStream,
    passage: &mut Passage,
) -> Result<()> {
    let mut is_told = false;
    loop {
        tokio::select! {
            frame = body.frame() => match frame {
                Some(Ok(frame)) => passage.pass(frame.data_ref().map_or(&[][..], |bytes| bytes))?,
                Some(Err(_)) => bail!("tasukid hung up: {}", passage.sentence()),
                None => return Ok(()),
            },
            _ = interruptions.readable(), if !is_told => {
                is_told = true;
                // The capture may have ended by itself meanwhile.
                let _ = client::open(folder, Verb::DELETE, &format!("/v1/captures/{number}"), None).await;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_disk_is_said_with_the_file_and_what_to_do() {
        let (out, file) = (output(Some(Path::new("/dev/full"))).expect("it can be opened"), Some("/dev/full".into()));
        let mut passage = Passage { out, file, passed: 0, unfinished: Vec::new(), frames: 0, missed: None };
        let said = format!("{:#}", passage.pass(&pcapng::section()).expect_err("it is full"));
        let begins = "/dev/full takes no more, and keeps the first 0 frames; write to where there is room (-w), ";
        assert!(said.starts_with(begins) && said.contains("No space left"), "{said}");
    }

    #[test]
    fn a_file_that_was_there_is_its_users_alone_afterwards_and_what_is_no_file_stays_as_it_was() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("shop.pcapng");
        std::fs::write(&path, "of the last time").expect("a file");
        std::fs::set_permissions(&path, Permissions::from_mode(0o644)).expect("a mode");
        output(Some(&path)).expect("a file of ours");
        let now = path.metadata().expect("it is there");
        assert_eq!((now.permissions().mode() & 0o777, now.len()), (0o600, 0));
        let mode = || Path::new("/dev/null").metadata().expect("it is there").permissions().mode();
        let before = mode();
        output(Some(Path::new("/dev/null"))).expect("anybody writes there");
        assert_eq!(mode(), before);
    }
}
