//! Devices that are strict with their drivers, and how they are served.
//!
//! | module        | what it is                                          |
//! |---------------|-----------------------------------------------------|
//! | [`vfio_user`] | serves a device to a driver in another process      |

pub mod vfio_user;
