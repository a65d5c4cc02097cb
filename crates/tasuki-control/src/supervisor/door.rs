//! Brings requests of other threads into the daemon's loop.

use std::path::PathBuf;
use std::sync::mpsc::Sender;
use std::sync::{Arc, Weak};

use rustix::event::EventfdFlags;
use tokio::sync::oneshot;

use super::captures::Of;
use crate::api::capture::Begun;
use crate::api::metrics::Metrics;
use crate::api::types::{
    Applied, Apply, Counts, Ended, Event, Give, NicView, NodeView, Plan, Refused, Relayed, Removed, Replaced, Settled,
    Staging, Standby, Status, Stopped, TalkView, Upgrade, VniNodeView, VniView, WorkerView, Written,
};
use crate::config;

/// Where the answer to a request goes.
pub type Answer<T> = oneshot::Sender<Result<T, Refusal>>;

/// Why a request is not, or was not, carried out, as a sentence.
#[derive(Debug)]
pub enum Refusal {
    /// There is no such thing.
    NotFound(String),
    /// The request is malformed.
    Malformed(String),
    /// It was tried, or cannot be tried now.
    Conflict {
        /// Why.
        sentence: String,
        /// Relays that had settled by then.
        relays: Vec<Settled>,
    },
    /// The daemon does something that the request has to wait for; the same request may succeed in a moment.
    Busy(String),
    /// The caller lacks permission.
    Forbidden(String),
    /// The daemon is ending.
    Ending,
}

impl Refusal {
    /// Returns the refusal of a request that cannot be carried out now.
    pub fn conflict(sentence: impl Into<String>) -> Self {
        Refusal::Conflict { sentence: sentence.into(), relays: Vec::new() }
    }
}

/// Returns why something failed, for a user. Without descriptors all fails somewhere, each time elsewhere, and one thing
/// is to be done.
pub fn why(error: &anyhow::Error) -> String {
    let said = format!("{error:#}");
    // EMFILE and ENFILE, in errors of many types.
    let lacks = ["(os error 24)", "(os error 23)", "lack of descriptors"].iter().any(|words| said.contains(words));
    if lacks {
        "tasukid, or the machine, may open no more descriptors; raise LimitNOFILE= of tasukid (ulimit -Hn), or remove nodes"
            .to_owned()
    } else {
        said
    }
}

impl From<Refusal> for Refused {
    fn from(refusal: Refusal) -> Self {
        match refusal {
            Refusal::NotFound(error) | Refusal::Malformed(error) | Refusal::Busy(error) | Refusal::Forbidden(error) => {
                Refused { error, relays: Vec::new() }
            }
            Refusal::Conflict { sentence, relays } => Refused { error: sentence, relays },
            Refusal::Ending => Refused {
                error: "tasukid is ending, or goes on as another version; ask again in a moment, or start it"
                    .to_owned(),
                relays: Vec::new(),
            },
        }
    }
}

/// A request to the loop.
#[derive(Debug)]
#[expect(missing_docs, reason = "each is the route of the same name")]
pub enum Request {
    Status(Answer<Status>),
    Nodes(Answer<Vec<NodeView>>),
    Workers(Answer<Vec<WorkerView>>),
    Nics(Answer<Vec<NicView>>),
    Events {
        since: u64,
        answer: Answer<Vec<Event>>,
    },
    Upgrade {
        node: String,
        upgrade: Upgrade,
        answer: Answer<Relayed>,
    },
    Stage {
        node: String,
        staging: Staging,
        answer: Answer<Relayed>,
    },
    Unstage {
        node: String,
        answer: Answer<Relayed>,
    },
    Give {
        nic: String,
        give: Give,
        answer: Answer<Relayed>,
    },
    Standby {
        nic: String,
        standby: Standby,
        answer: Answer<NicView>,
    },
    Counts {
        nic: String,
        answer: Answer<Counts>,
    },
    Metrics(Answer<Metrics>),
    Configuration(Answer<Written>),
    Plan {
        apply: Apply,
        answer: Answer<Plan>,
    },
    Apply {
        apply: Apply,
        answer: Answer<Applied>,
    },
    AddNode {
        node: Box<config::Node>,
        answer: Answer<NodeView>,
    },
    RemoveNode {
        node: String,
        answer: Answer<Removed>,
    },
    Vnis(Answer<Vec<VniView>>),
    VniTable {
        vni: String,
        answer: Answer<Vec<VniNodeView>>,
    },
    VniStats {
        vni: String,
        answer: Answer<Vec<TalkView>>,
    },
    Capture {
        of: Of,
        snap: u32,
        answer: Answer<Begun>,
    },
    EndCapture {
        number: u32,
        answer: Answer<Ended>,
    },
    /// The reader of a capture is gone; sent by the HTTP answer itself.
    CaptureOver {
        number: u32,
        frames: u64,
        missed: u64,
    },
    /// The program is fit to go on as: the caller has checked it.
    Replace {
        with: PathBuf,
        version: String,
        /// What it says of itself: what earlier ones did not know.
        says: String,
        answer: Answer<Replaced>,
    },
    Stop(Answer<Stopped>),
    /// A sentence to put among the events.
    Note(String),
}

/// A request as the loop gets it, and the caller that it is for, if any.
pub type Queued = (Request, Option<Weak<()>>);

/// The entrance to the loop.
#[derive(Debug, Clone)]
pub struct Door {
    requests: Sender<Queued>,
    bell: Arc<rustix::fd::OwnedFd>,
}

impl Door {
    /// Creates a door that puts requests into `requests` and rings its bell for each.
    pub fn new(requests: Sender<Queued>) -> std::io::Result<Self> {
        let bell = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Door { requests, bell: Arc::new(bell) })
    }

    /// Puts a request in that is carried out in any case.
    pub fn put(&self, request: Request) {
        self.queue((request, None));
    }

    /// Puts a request in that is carried out only if `caller` is there when its turn comes.
    pub fn put_for(&self, caller: &Arc<()>, request: Request) {
        self.queue((request, Some(Arc::downgrade(caller))));
    }

    fn queue(&self, queued: Queued) {
        // If the loop has ended, the caller that waits for the answer sees that: its sender is dropped.
        let _ = self.requests.send(queued);
        self.ring();
    }

    /// Has the loop look for requests.
    pub fn ring(&self) {
        let _ = rustix::io::write(&*self.bell, &1_u64.to_ne_bytes());
    }

    /// Returns the bell.
    pub fn bell(&self) -> &rustix::fd::OwnedFd {
        &self.bell
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lack_of_descriptors_says_how_to_get_some() {
        for errno in [rustix::io::Errno::MFILE, rustix::io::Errno::NFILE] {
            let error = anyhow::Error::new(std::io::Error::from(errno)).context("worker-17.sock cannot be listened at");
            assert!(why(&error).ends_with("raise LimitNOFILE= of tasukid (ulimit -Hn), or remove nodes"), "{error:#}");
        }
        let other = anyhow::anyhow!("no").context("it is so");
        assert_eq!(why(&other), "it is so: no");
    }
}
