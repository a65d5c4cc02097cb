//! Shortcuts: for each VNI what its namespaces reach each other by, through the kernel and past their workers.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;

use tasuki_tap::namespace::Namespace;
use tasuki_tap::shortcut::Shortcut;
pub use tasuki_tap::shortcut::{Crossed, Leg};
use tasuki_tap::{Address, TapError};

use crate::config;

/// A namespace's place on a VNI.
#[derive(Debug)]
pub struct OnVni {
    /// Which.
    pub vni: String,
    mac: [u8; 6],
}

impl OnVni {
    /// That of a node which may take the shortcut.
    pub fn of(node: &config::Node) -> Option<Self> {
        let vni = node.vni.clone().filter(|_| node.tap().is_some_and(|tap| tap.shortcut))?;
        Some(OnVni { vni, mac: node.mac() })
    }
}

/// Those of all VNIs.
#[derive(Debug, Default)]
pub struct Shortcuts(BTreeMap<String, Shortcut>);

impl Shortcuts {
    /// Gives a namespace an interface and a leg; and returns what its worker reads and writes.
    pub fn connect(
        &mut self,
        on: &OnVni,
        place: &Namespace,
        name: &str,
        address: Option<Address>,
    ) -> Result<(Leg, OwnedFd), TapError> {
        if !self.0.contains_key(&on.vni) {
            self.0.insert(on.vni.clone(), Shortcut::new()?);
        }
        self.0.get_mut(&on.vni).expect("just made").connect(place, name, address, on.mac)
    }

    /// Goes on with the leg beside a TAP.
    pub fn adopt(&mut self, on: &OnVni, device: &OwnedFd) -> Result<Leg, TapError> {
        if !self.0.contains_key(&on.vni) {
            let shortcut = Shortcut::around(device)?;
            self.0.insert(on.vni.clone(), shortcut);
        }
        self.0.get_mut(&on.vni).expect("just made").adopt(device, on.mac)
    }

    /// Nobody is on this VNI any more.
    pub fn forget(&mut self, vni: &str) {
        self.0.remove(vni);
    }
}
