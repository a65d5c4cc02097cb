//! Looks after the sockets at which programs connect to nodes: makes one again whose file was deleted, and has the node's
//! workers serve that. And looks whether a machine that is connected shares its memory.
//!
//! Each look is a thread's: the file system of a folder, and a process that is looked at, can keep it waiting.

use std::collections::BTreeSet;
use std::io::BufReader;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tasuki_relay::message::ToWorker;

use super::card::Card;
use super::deposits::Key;
use super::endpoints::{Connected, Endpoint};
use super::worker::Worker;
use super::{About, Supervisor, WORKER_TIMEOUT, is_news, now};
use crate::api::peer::Peer;
use crate::api::types::{Refused, Upgrade};
use crate::channel;
use crate::config;
use crate::endpoint::{socket, vm};
use crate::foreign::seals;

/// Interval at which the daemon asks whether sockets are there, and pause before it tries again to make one.
const SOCKETS_EVERY: Duration = Duration::from_secs(1);
const SOCKET_RETRY_PAUSE: Duration = Duration::from_secs(2);

/// A look at the memory of a process.
#[derive(Debug)]
pub struct Look {
    process: Peer,
    /// Inode number of its connection's socket, and the files.
    socket: u64,
    files: Vec<(u64, u64)>,
    /// Whether it has one of the files for itself, once that is known.
    found: Arc<OnceLock<bool>>,
    was_told: bool,
}

impl Look {
    /// Returns `None` if there is no thread for it.
    fn begin(process: Peer, socket: u64, files: Vec<(u64, u64)>) -> Option<Self> {
        let found = Arc::new(OnceLock::new());
        let (pid, of, tell) = (process.pid, files.clone(), Arc::clone(&found));
        let look = move || {
            crate::spawn::hold_signals();
            let maps = std::fs::File::open(format!("/proc/{pid}/maps"));
            let _ = tell.set(maps.is_ok_and(|maps| vm::has_private(BufReader::new(maps), &of)));
        };
        std::thread::Builder::new().name(format!("maps of {pid}")).spawn(look).ok()?;
        Some(Look { process, socket, files, found, was_told: false })
    }
}

/// A look at the paths of sockets, in a thread: a folder's file system can keep that waiting.
#[derive(Debug)]
struct PathLook {
    begun: Duration,
    /// Labels of the sockets that are still those at which it looks.
    of: BTreeSet<String>,
    /// What is there, once it is known.
    found: Arc<OnceLock<Marks>>,
}

/// Label and mark of each socket.
type Marks = Vec<(String, Option<String>)>;

/// What the daemon knows of the sockets of nodes.
#[derive(Debug, Default)]
pub struct Sockets {
    /// Labels of those that are not at their paths.
    lost: Vec<String>,
    look: Option<PathLook>,
}

impl Sockets {
    /// Forgets what is known of a socket: another may get its label.
    pub(super) fn forget(&mut self, label: &str) {
        self.lost.retain(|lost| lost != label);
        self.look.iter_mut().for_each(|look| _ = look.of.remove(label));
    }

    /// Returns what the look has found of the sockets that are still those at which it looked, once it is over.
    fn found(&mut self) -> Marks {
        let Some(look) = self.look.take_if(|look| look.found.get().is_some()) else { return Marks::new() };
        let found = look.found.get().into_iter().flatten();
        found.filter(|(label, _)| look.of.contains(label)).cloned().collect()
    }
}

impl Connected {
    /// Returns device and number of each file in memory that came with it.
    fn memory(&self) -> Vec<(u64, u64)> {
        // Only files in memory have seals: no other file system is asked.
        let files = self.fds.iter().filter(|fd| seals(fd).is_some());
        files.filter_map(|fd| rustix::fs::fstat(fd).ok()).map(|stat| (stat.st_dev, stat.st_ino)).collect()
    }
}

impl Endpoint {
    /// Returns the path of its socket, where programs look for it, if it has one.
    fn socket(&self) -> Option<PathBuf> {
        self.mark.as_ref().and(self.work.endpoint()?.socket()).map(Path::to_owned)
    }

    /// Has a thread look whether the process that connected shares the memory of its machine.
    pub(super) fn look_at_memory(&mut self) {
        let (Some(client), config::Work::Vm(_)) = (&self.client, &self.work) else { return };
        let files = client.memory();
        let is_known = self.look.as_ref().is_some_and(|look| {
            let is_same = look.socket == client.socket && look.files == files;
            // A process can keep a thread that looks at it waiting: there is one a node.
            is_same || look.found.get().is_none()
        });
        if let Some(process) = client.process().filter(|_| !files.is_empty() && !is_known) {
            self.look = Look::begin(process, client.socket, files);
        }
    }

    /// Returns what is wrong with the memory of the machine that is connected, if it is known.
    fn unshared(&self) -> Option<String> {
        let client = self.client.as_ref()?;
        let look = self.look.as_ref().filter(|look| look.socket == client.socket && look.found.get() == Some(&true))?;
        let Peer { pid, program, .. } = &look.process;
        Some(format!(
            "process {pid} ({program}) does not share its machine's memory, so the guest reaches nobody: start it with share=on at its memory backend"
        ))
    }
}

impl Worker {
    /// Has it listen at a new socket, if its own was deleted.
    ///
    /// # Errors
    /// The next daemon will not find it.
    fn listen_anew(&mut self) -> Result<()> {
        let (path, remedy) =
            (&self.record.socket, format!("upgrade it now (tasuki worker upgrade {})", self.record.node));
        if path.exists() {
            let is_late = |(_, told): &(OwnedFd, Duration)| now().saturating_sub(*told) >= WORKER_TIMEOUT;
            // It may lie, or have no descriptor left: an upgrade of tasukid does not wait for it.
            ensure!(!self.next_listener.as_ref().is_some_and(is_late), "it does not listen at another; {remedy}");
            return Ok(());
        }
        ensure!(self.listens_anew(), "it cannot listen at another; {remedy}");
        let listener = channel::listen(path).with_context(|| format!("{} cannot be listened at", path.display()))?;
        self.write(&ToWorker::Listen, &[listener.as_fd()]).inspect_err(|_| _ = std::fs::remove_file(path))?;
        self.next_listener = Some((listener, now()));
        Ok(())
    }

    /// Returns whether it listens at its new socket since this was last asked.
    fn listens_by_now(&mut self) -> bool {
        let pid = self.process.name().pid;
        // The kernel names the process that called listen(2) last.
        let listens = |(socket, _): &mut (OwnedFd, Duration)| {
            tasuki_shm::peer::Credentials::of(&*socket).is_ok_and(|peer| peer.pid == pid)
        };
        self.next_listener.take_if(listens).is_some()
    }
}

impl Supervisor {
    /// Says what was found of the memory of machines.
    pub(super) fn tell_of_memory(&mut self) {
        let mut unshared = Vec::new();
        for (label, end) in &mut self.endpoints {
            let Some(sentence) = end.unshared() else { continue };
            if end.look.as_mut().is_some_and(|look| !std::mem::replace(&mut look.was_told, true))
                && end.client_events.take(now())
            {
                unshared.push((label.clone(), sentence));
            }
        }
        for (label, sentence) in unshared {
            if let Some(node) = self.node_at(&label) {
                self.note(About::node(&node), format!("node {node}: {sentence}"));
            }
        }
    }

    /// Makes the sockets of workers again that were deleted: the next daemon finds no worker without its own. Returns whether
    /// it finds all by now.
    pub(super) fn mend_worker_sockets(&mut self) -> bool {
        if !self.place.is_ours() {
            // Another daemon may have begun in a directory that was deleted.
            return true;
        }
        let (mut mended, mut lost) = (0, Vec::new());
        for worker in self.workers.values_mut().filter(|worker| worker.serves()) {
            mended += u32::from(worker.listens_by_now());
            match worker.listen_anew() {
                Ok(()) => worker.unfound = None,
                Err(error) => {
                    let (number, node) = (worker.party(), worker.record.node.clone());
                    let why = format!(
                        "the socket of worker {number} was deleted, so the next tasukid ends that worker and starts another: {error:#}"
                    );
                    if is_news(&mut worker.unfound, &why) {
                        lost.push((node, why));
                    }
                }
            }
        }
        if mended > 0 {
            let folder = self.place.folder().display();
            self.note(
                About::default(),
                format!("{mended} of the workers' sockets in {folder} were deleted, and are there anew"),
            );
        }
        for (node, why) in lost {
            self.note(About::node(&node), format!("node {node}: {why}"));
        }
        self.workers.values().all(|worker| worker.unfound.is_none() && worker.next_listener.is_none())
    }

    /// Makes a socket again that was deleted: no program finds a listener without its path. Or has a fresh worker serve one
    /// that was made again. One at a time, when nothing is more urgent.
    pub(super) fn mend_sockets(&mut self) {
        if let Some(label) = self.sockets.lost.pop() {
            return self.make_socket_again(&label);
        }
        if let Some((label, node)) = self.unserved() {
            return self.serve_socket_again(&label, &node);
        }
        if self.sockets.look.as_ref().is_some_and(|look| now().saturating_sub(look.begun) < SOCKETS_EVERY) {
            return;
        }
        for (label, mark) in self.sockets.found() {
            let Some(end) = self.endpoints.get_mut(&label) else { continue };
            match mark == end.mark {
                true if !end.was_remade => end.lost = None,
                true => {}
                false => self.sockets.lost.push(label),
            }
        }
        if self.sockets.lost.is_empty() && self.sockets.look.is_none() {
            self.look_at_sockets();
        }
    }

    fn look_at_sockets(&mut self) {
        let paths: Vec<_> =
            self.endpoints.iter().filter_map(|(label, end)| Some((label.clone(), end.socket()?))).collect();
        if paths.is_empty() {
            return;
        }
        let found = Arc::new(OnceLock::new());
        let (of, tell) = (paths.iter().map(|(label, _)| label.clone()).collect(), Arc::clone(&found));
        let look = move || {
            crate::spawn::hold_signals();
            let _ = tell.set(paths.into_iter().map(|(label, path)| (label, socket::mark_behind(&path))).collect());
        };
        let begun = std::thread::Builder::new().name("sockets".to_owned()).spawn(look);
        self.sockets.look = begun.ok().map(|_| PathLook { begun: now(), of, found });
    }

    fn make_socket_again(&mut self, label: &str) {
        let Some(node) = self.node_at(label).filter(|node| self.is_free(node, &[]).is_ok()) else { return };
        let Some(end) = self.endpoints.get_mut(label).filter(|end| end.not_before <= now()) else { return };
        match end.make_again() {
            Ok(()) => {
                let tells = end.client_events.take(now());
                self.mark_deposit(Key::Endpoint(label.to_owned()));
                if tells {
                    let why = format!(
                        "the socket {label} was deleted, and is there anew; a fresh worker of node {node} takes over, which listens there"
                    );
                    self.note(About::node(&node), why);
                }
            }
            Err(error) => {
                end.not_before = now() + SOCKET_RETRY_PAUSE;
                let why = format!(
                    "the socket of node {node} was deleted, so no program can connect to it, and it cannot be made again: {error:#}"
                );
                self.note_lost_socket(label, &node, why);
            }
        }
    }

    fn note_lost_socket(&mut self, label: &str, node: &str, why: String) {
        if self.endpoints.get_mut(label).is_some_and(|end| is_news(&mut end.lost, &why)) {
            self.note(About::node(node), why);
        }
    }

    /// Returns a socket that was made again and its node, if its driver has the one before.
    fn unserved(&mut self) -> Option<(String, String)> {
        let remade: Vec<String> =
            self.endpoints.iter().filter(|(_, end)| end.was_remade).map(|(label, _)| label.clone()).collect();
        for label in remade {
            let Some(node) = self.node_at(&label) else { continue };
            let card = self.end_on_vni(&node);
            let driver = card.and_then(Card::holder).and_then(|holder| self.workers.get(&holder));
            let (Some(driver), Some(end)) = (driver, self.endpoints.get_mut(&label)) else { continue };
            if driver.record.endpoint.as_ref().or(end.adopted.as_ref()) == end.mark.as_ref() {
                (end.was_remade, end.lost) = (false, None);
            } else if end.not_before <= now() && self.is_deposited(&[Key::Endpoint(label.clone())]) {
                return Some((label, node));
            }
        }
        None
    }

    fn serve_socket_again(&mut self, label: &str, node: &str) {
        if self.is_free(node, &[]).is_err() {
            return;
        }
        if let Some(end) = self.endpoints.get_mut(label) {
            end.not_before = now() + SOCKET_RETRY_PAUSE;
        }
        // A staged worker has begun with the old one. If there is none, that is as well.
        let _ = self.unstage(node);
        match self.begin_upgrade(node, Upgrade::default()) {
            Ok(job) => self.jobs.push(job),
            Err(refusal) => {
                let why = Refused::from(refusal).error;
                let why = format!("the socket of node {node} was deleted, and no worker serves the new one yet: {why}");
                self.note_lost_socket(label, node, why);
            }
        }
    }

    fn node_at(&self, label: &str) -> Option<String> {
        let is_its = |node: &&config::Node| node.label().is_some_and(|its| its == label);
        self.config.node.iter().find(is_its).map(|node| node.name.clone())
    }

    /// Returns what is wrong with a node's socket, or with the program that is connected there.
    pub(super) fn trouble_at_socket(&self, name: &str) -> Option<String> {
        let end = self.endpoints.get(&self.config.node(name)?.endpoint()?.label())?;
        end.lost.clone().or_else(|| end.unshared().map(|why| format!("node {name}: {why}")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_look_says_nothing_of_a_socket_that_got_its_label_since() {
        let found = vec![("gone".to_owned(), None), ("here".to_owned(), Some("1:2".to_owned()))];
        let of = found.iter().map(|(label, _)| label.clone()).collect();
        let look = PathLook { begun: Duration::ZERO, of, found: Arc::new(found.clone().into()) };
        let mut sockets = Sockets { lost: vec!["gone".to_owned()], look: Some(look) };
        sockets.forget("gone");
        assert_eq!((sockets.found(), sockets.lost), (found[1..].to_vec(), vec![]));
        assert!(sockets.look.is_none(), "another look may begin");
    }
}
