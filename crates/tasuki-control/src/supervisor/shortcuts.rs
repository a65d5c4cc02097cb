//! Shortcuts: for each VNI, how its namespaces reach each other through the kernel and past their workers.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;

use tasuki_tap::namespace::Namespace;
use tasuki_tap::shortcut::Shortcut;
pub use tasuki_tap::shortcut::{Crossed, Lost, VethEnd};
use tasuki_tap::{Settings, TapError};

use crate::config;

/// A namespace's place on a VNI.
#[derive(Debug)]
pub struct OnVni {
    /// Name of the VNI.
    pub vni: String,
    /// Whether it may take the shortcut.
    pub may_shortcut: bool,
    /// Its station address.
    pub mac: [u8; 6],
    /// Whether it may send from other addresses.
    pub may_have_others: bool,
}

impl OnVni {
    /// Returns the place of a node that is a namespace on a VNI.
    pub fn of(node: &config::Node) -> Option<Self> {
        // Only workers look at IP addresses, and keep limits.
        let may_shortcut = node.tap()?.shortcut && node.addresses.is_empty() && node.limits.is_none();
        Some(OnVni { vni: node.vni.clone()?, may_shortcut, mac: node.mac(), may_have_others: node.has_others() })
    }
}

/// The shortcuts of all VNIs.
#[derive(Debug, Default)]
pub struct Shortcuts(BTreeMap<String, Shortcut>);

impl Shortcuts {
    /// Gives a namespace an interface and a veth end. Returns the veth end and the descriptor that its worker reads
    /// and writes.
    pub fn connect(
        &mut self,
        on: &OnVni,
        place: &Namespace,
        name: &str,
        settings: &Settings,
    ) -> Result<(VethEnd, OwnedFd), TapError> {
        self.with(&on.vni, Shortcut::new, |shortcut| shortcut.connect(place, name, settings, on.mac))
    }

    /// Adopts the veth end beside a TAP, even if its namespace may no longer take the shortcut: then all its frames
    /// go by its worker.
    pub fn adopt(&mut self, on: &OnVni, device: &OwnedFd) -> Result<VethEnd, TapError> {
        self.with(&on.vni, || Shortcut::around(device), |shortcut| shortcut.adopt(device, on.mac, on.may_shortcut))
    }

    /// Works on a VNI's shortcut, and makes one if there is none. Removes that again if the work fails.
    fn with<T>(
        &mut self,
        vni: &str,
        make: impl FnOnce() -> Result<Shortcut, TapError>,
        work: impl FnOnce(&mut Shortcut) -> Result<T, TapError>,
    ) -> Result<T, TapError> {
        if let Some(shortcut) = self.0.get_mut(vni) {
            return work(shortcut);
        }
        let mut shortcut = make()?;
        let done = work(&mut shortcut)?;
        self.0.insert(vni.to_owned(), shortcut);
        Ok(done)
    }

    /// Removes veth ends that no worker drives and no node has.
    pub fn sweep(&self) -> Result<(), TapError> {
        self.0.values().try_for_each(|shortcut| shortcut.sweep().map(drop))
    }

    /// Drops the shortcut of a VNI that no node is on any more.
    pub fn forget(&mut self, vni: &str) {
        self.0.remove(vni);
    }
}
